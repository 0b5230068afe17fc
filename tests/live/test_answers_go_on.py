"""A client whose connection broke goes on, at the same head, a restarted one or a standby: it names
its request and how many tokens it has. What the head knows is not computed again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.live.calls import fresh
from tests.live.test_parts import Parts
from tests.live.test_standby import Pair, until

WAIT_S = 120.0
DRAWN = {
    "prompt": [5] * 300,
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 1,
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@dataclass
class Got:
    """What a client has received of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    counts: list[int] = field(default_factory=list)
    finish: str | None = None
    names: set[tuple[str, int]] = field(default_factory=set)
    is_cut: bool = False

    def read(self, url: str, body: dict[str, Any], name: str, most: int = 1 << 30) -> None:
        """Reads the events after the tokens that are here, at most so many."""
        headers = {"X-Request-Id": name}
        if self.tokens:
            headers["X-Resume-Tokens"] = str(len(self.tokens))
        self.is_cut = False
        try:
            with fresh.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
                        most -= 1
                    if not most:
                        return
        except httpx.HTTPError:
            self.is_cut = True

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.names.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            self.tokens += choice.get("token_ids", [])
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish
            self.counts.append(chunk["usage"]["completion_tokens"])


class Reader(Got):
    """Reads in a thread until the stream ends or breaks."""

    def start(self, url: str, body: dict[str, Any], name: str) -> None:
        self.thread = threading.Thread(target=self.read, args=(url, body, name))
        self.thread.start()


def generated_at(pair: Parts, url: str) -> float:
    """How many tokens this head's instances have generated."""
    text = fresh.get(f"{url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def seeded(url: str, seed: int) -> dict[str, Any]:
    """The undisturbed answer with this seed."""
    body = DRAWN | {"seed": seed, "stream": False}
    del body["stream_options"]
    answer: dict[str, Any] = fresh.post(url, json=body, timeout=WAIT_S).json()["choices"][0]
    return answer


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.end()


@pytest.mark.long
def test_streams_go_on_at_a_standby_which_computes_only_the_rest(pair: Pair) -> None:
    url, other = f"{pair.url}/v1/completions", f"{pair.standby_url}/v1/completions"
    bodies = [DRAWN | {"prompt": [7 + number] * 300, "seed": number} for number in range(3)]
    expected = []
    for body in bodies:
        whole = Got()
        whole.read(url, body, "whole")
        expected.append(whole)
    # Without a seed too: what was drawn is known at the standby.
    bodies.append(DRAWN)
    readers = [Reader() for _ in bodies]
    for number, (reader, body) in enumerate(zip(readers, bodies, strict=True)):
        reader.start(url, body, f"answer-{number}")
    until(lambda: all(len(reader.tokens) > 100 for reader in readers))
    pair.kill_first()
    for reader in readers:
        reader.thread.join(WAIT_S)
    assert all(reader.is_cut for reader in readers)
    have = [len(reader.tokens) for reader in readers]
    assert all(count < DRAWN["max_tokens"] for count in have)
    until(lambda: pair.instances(pair.standby_url) == ["d", "p"])
    for number, (reader, body) in enumerate(zip(readers, bodies, strict=True)):
        reader.read(other, body, f"answer-{number}")
    for reader, whole in zip(readers, expected, strict=False):
        assert reader.tokens == whole.tokens
        assert reader.text == whole.text
    for reader in readers:
        assert len(reader.tokens) == DRAWN["max_tokens"]
        assert reader.counts == sorted(reader.counts)
        assert reader.finish == "length"
        assert len(reader.names) == 1
    left = sum(DRAWN["max_tokens"] - count for count in have)
    computed = generated_at(pair, pair.standby_url)
    assert computed <= left + 4 * 100, "the standby computes what its copies lack"
