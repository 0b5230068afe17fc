"""A client whose connection broke continues its answer at the same head, a restarted head or a
standby. The client names its request and how many tokens it has. The head does not compute again
what it knows."""

from __future__ import annotations

import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.certificates import make_certificates
from tests.live.calls import fresh
from tests.live.test_https import certificate
from tests.live.test_parts import Part
from tests.live.test_standby import Pair, head_process_of
from tests.live.waiting import WAIT_S, wait_until

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
    """Holds what a client has received of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    counts: list[int] = field(default_factory=list)
    finish: str | None = None
    names: set[tuple[str, int]] = field(default_factory=set)
    is_cut: bool = False
    calls: httpx.Client = fresh

    def read(self, url: str, body: dict[str, Any], name: str, most: int = 1 << 30) -> None:
        """Reads at most this many events after the tokens that the client has."""
        headers = {"X-Request-Id": name}
        if self.tokens:
            headers["X-Resume-Tokens"] = str(len(self.tokens))
        self.is_cut = False
        try:
            call = {"json": body, "headers": headers, "timeout": WAIT_S}
            with self.calls.stream("POST", url, **call) as answer:
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


def kill_first_once_copied(pair: Pair, readers: Sequence[Got]) -> None:
    """Kills the head while its standby has copies of all that the clients have. The decode worker
    is stopped until the kill, so no answer ends before it, however slow this machine is."""
    decode, have = pair.workers[1].pid, [-1]
    os.kill(decode, signal.SIGSTOP)
    try:
        while have != (have := [len(reader.tokens) for reader in readers]):
            time.sleep(1.0)  # many times as long as copies may lag behind
        pair.kill_first()
    finally:
        os.kill(decode, signal.SIGCONT)


def generated_at(url: str, calls: httpx.Client = fresh) -> float:
    """Returns how many tokens this head has sent."""
    text = calls.get(f"{url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


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
    # This holds for requests without a seed too: the standby knows the tokens that were drawn.
    bodies.append(DRAWN)
    readers = [Reader() for _ in bodies]
    for number, (reader, body) in enumerate(zip(readers, bodies, strict=True)):
        reader.start(url, body, f"answer-{number}")
    wait_until(lambda: all(len(reader.tokens) > 20 for reader in readers))
    kill_first_once_copied(pair, readers)
    for reader in readers:
        reader.thread.join(WAIT_S)
    assert any(reader.is_cut for reader in readers)
    have = [len(reader.tokens) for reader in readers]
    wait_until(lambda: pair.instances(pair.standby_url) == ["d", "p"])
    for number, (reader, body) in enumerate(zip(readers, bodies, strict=True)):
        if reader.is_cut:  # on a busy machine, one answer may end before another begins
            assert have[number] < DRAWN["max_tokens"]
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
    computed = generated_at(pair.standby_url)
    assert 0 < computed <= left + 4 * 100, "the standby computes what its copies lack"


class Address(httpx.BaseTransport):
    """Serves one address for both heads, as a load balancer or a name gives it."""

    def __init__(self, url: str) -> None:
        self.url = httpx.URL(url)
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self.url.port)
        return self._transport.handle_request(request)


def documented_client() -> Callable[..., Iterator[Any]]:
    """Runs the client of docs/operating.md that counts tokens."""
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    found: dict[str, Any] = {}
    exec(page[page.index("import time, uuid") :].partition("```")[0], found)
    client: Callable[..., Iterator[Any]] = found["go_on"]
    return client


@pytest.mark.long
def test_the_retries_of_openais_client_reach_the_standby_and_lose_nothing(pair: Pair) -> None:
    fields = {"prompt": [9] * 300, "max_tokens": 900, "temperature": 1, "seed": 11}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = fresh.post(f"{pair.url}/v1/completions", json=fields | extra, timeout=WAIT_S).json()
    address = Address(pair.url)
    client = openai.OpenAI(
        base_url=f"{pair.url}/v1",
        api_key="none",
        max_retries=40,
        timeout=WAIT_S,
        http_client=httpx.Client(transport=address),
    )
    model = client.models.list().data[0].id
    answers: list[Any] = []

    def ask() -> None:
        headers = {"X-Request-Id": "asked-once"}
        call = {"model": model, **fields, "extra_body": extra, "extra_headers": headers}
        answers.append(client.completions.create(**call))

    body = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 900, "seed": 3}
    body |= {"model": model, "temperature": 1}
    plain = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    chunks: list[Any] = []

    def follow() -> None:
        chunks.extend(documented_client()(client, **body, extra_body={"ignore_eos": True}))

    threads = [threading.Thread(target=ask), threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    clock = Reader()  # This client must get as many tokens as the other client.
    clock.start(f"{pair.url}/v1/completions", DRAWN, "clock")
    wait_until(lambda: len(clock.tokens) > 200)
    kill_first_once_copied(pair, [clock])
    address.url = httpx.URL(pair.standby_url)
    for thread in (*threads, clock.thread):
        thread.join(WAIT_S)
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text for text in said if text) == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 900
    assert len({chunk.id for chunk in chunks}) == 1
    (answer,) = answers
    assert answer.id == "cmpl-asked-once"
    assert answer.choices[0].token_ids == whole["choices"][0]["token_ids"]
    assert answer.usage.completion_tokens == fields["max_tokens"]
    computed = generated_at(pair.standby_url)
    assert 0 < computed < 2 * (fields["max_tokens"] - 100), "the standby computes only the rest"


@pytest.mark.long
def test_a_cut_answer_goes_on_at_the_head_that_was_started_again(pair: Pair) -> None:
    url = f"{pair.url}/v1/completions"
    # Repeats the cut, because a slow reader may get all tokens at once.
    for name in ("cut", "cut-again", "cut-once-more"):
        got = Got()
        got.read(url, DRAWN, name, 20)
        if got.finish is None:
            break
    assert len(got.tokens) < DRAWN["max_tokens"]
    head = head_process_of(pair.first.pid)
    assert head is not None
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: pair.instances(pair.url) == ["d", "p"])
    before = len(got.tokens)
    got.read(url, DRAWN, name)
    assert len(got.tokens) == DRAWN["max_tokens"]
    assert (got.finish, got.is_cut, len(got.names)) == ("length", False, 1)
    assert 0 < generated_at(pair.url) <= DRAWN["max_tokens"] - before


class SecurePair(Pair):
    """Whether this holds if all connections are encrypted, including those of clients, and decode
    has an attention worker."""

    scheme = "https"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "moonpool.toml"
        text = "[cluster]\nprefill = 1\ndecode = 1\nattention = 1\n"
        self._config.write_text(text + "[network]\nuse_shared_memory = false\n")
        self.certificate, self.key = certificate(folder)
        self.calls = httpx.Client(verify=ssl.create_default_context(cafile=self.certificate))
        super().__init__()

    def _encrypted(self, name: str) -> list[str]:
        return make_certificates(self._folder, "ours", name).flags

    def _head_flags(self, name: str) -> list[str]:
        http = ["--ssl-certfile", self.certificate, "--ssl-keyfile", self.key]
        return ["--config", str(self._config), *http, *self._encrypted(name)]

    def start_head(self, *options: str) -> Part:
        return super().start_head(*self._head_flags("head"), *options)

    def start_worker(self, role: str, name: str, **environment: str) -> Part:
        line = ["worker", "--role", role, "--head", f"127.0.0.1:{self.head_port}", "--name", name]
        if role == "decode":
            self.start(*line[:2], "attention", *line[3:5], "--name", "a", *self._encrypted("a"))
        return self.start(*line, *self._encrypted(name), **environment)

    def start_standby(self, port: int) -> Part:
        ports = ["--head-port", str(free_port()), "--port", str(port)]
        line = ["head", "--standby-of", f"127.0.0.1:{self.head_port}", *ports]
        return self.start(*line, *self._head_flags("standby"))


@pytest.mark.long
def test_streams_go_on_over_tls_and_with_attention_workers(tmp_path: Path) -> None:
    pair = SecurePair(tmp_path)
    try:
        whole, reader = Got(calls=pair.calls), Reader(calls=pair.calls)
        whole.read(f"{pair.url}/v1/completions", DRAWN | {"seed": 3}, "whole")
        reader.start(f"{pair.url}/v1/completions", DRAWN | {"seed": 3}, "a")
        wait_until(lambda: len(reader.tokens) > 100)
        kill_first_once_copied(pair, [reader])
        reader.thread.join(WAIT_S)
        assert reader.is_cut
        before = len(reader.tokens)
        wait_until(lambda: pair.instances(pair.standby_url) == ["d", "p"])
        reader.read(f"{pair.standby_url}/v1/completions", DRAWN | {"seed": 3}, "a")
        assert reader.tokens == whole.tokens
        assert (reader.text, reader.finish) == (whole.text, "length")
        computed = generated_at(pair.standby_url, pair.calls)
        assert 0 < computed <= DRAWN["max_tokens"] - before + 100
        assert [one["owner"] for one in pair.cluster(pair.standby_url)["attention"]] == ["d"]
    finally:
        pair.end()
