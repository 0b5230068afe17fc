"""A standby takes over when head and supervisor are killed: workers join it with their cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.api.resume import event_ids
from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.test_faults import command_of, wait_until_gone
from tests.live.test_parts import Part, Parts
from tests.live.waiting import WAIT_S, wait_until
from tests.processes import children_of

Body = dict[str, Any]
BODIES: list[Body] = [
    {"prompt": [3 + number] * 300, "max_tokens": 1200, "ignore_eos": True, **sampling}
    for number, sampling in enumerate(
        [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0}]
    )
]

DRAWN: Body = BODIES[0] | {"temperature": 1, "max_tokens": 300}


class Pair(Parts):
    """Runs a head, its standby, one prefill and one decode instance."""

    scheme, calls = "http", fresh

    def __init__(self) -> None:
        super().__init__()
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"
        self.first = self.start_head()
        self.workers = [self.start_worker("prefill", "p"), self.start_worker("decode", "d")]
        wait_until(lambda: self.instances(self.url) == ["d", "p"])
        port = free_port()
        self.standby_url = f"{self.scheme}://127.0.0.1:{port}"
        self.standby = self.start_standby(port)
        wait_until(lambda: len(self.cluster(self.url)["standbys"]) == 1)

    def start_standby(self, port: int) -> Part:
        ports = ["--head-port", str(free_port()), "--port", str(port)]
        return self.start("head", "--standby-of", f"127.0.0.1:{self.head_port}", *ports)

    def cluster(self, url: str) -> dict[str, Any]:
        found: dict[str, Any] = self.calls.get(f"{url}/cluster", timeout=60).json()
        return found

    def kill_first(self) -> None:
        """Kills the machine of the head: the supervisor, the head, and all their children."""
        pids = [self.first.pid, *children_of(self.first.pid)]
        # stops the supervisor, so that it starts no other head
        self.first.send_signal(signal.SIGSTOP)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids[1:])

    def instances(self, url: str) -> list[str]:
        try:
            return sorted(i["instance_id"] for i in self.cluster(url)["instances"])
        except httpx.HTTPError:
            return []


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.end()


def whole(url: str, body: Body) -> tuple[str, int]:
    """Returns the text, and how many tokens of the prompt were cached."""
    answer = fresh.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


class CutStream:
    """Reads a stream until it ends or breaks."""

    def __init__(self, url: str, body: Body) -> None:
        self.text, self.is_cut = "", False
        self._call = (url, body)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        url, body = self._call
        try:
            with fresh.stream(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=WAIT_S
            ) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.text += json.loads(line[6:])["choices"][0]["text"]
        except httpx.HTTPError:
            self.is_cut = True


def documented_client() -> Callable[..., Iterator[Any]]:
    """Runs the client of docs/operating.md."""
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    found: dict[str, Any] = {}
    source = page[page.index("import contextlib, itertools") :].partition("```")[0]
    exec(source, found)
    client: Callable[..., Iterator[Any]] = found["stream"]
    return client


class LastingStream:
    """Reads a stream to its end, at the first head and then at its standby."""

    def __init__(self, urls: list[str], path: str, body: Body) -> None:
        self.chunks: list[dict[str, Any]] = []
        self._call = (urls, path, body | {"stream": True})
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for chunk in documented_client()(*self._call):
            self.chunks.append(chunk)

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def first_events(url: str, body: Body, last: str, most: int = 1 << 20) -> tuple[str, str]:
    """Returns the text of this many events after the event with the id `last`, and the id of the
    last event."""
    text = ""
    headers = {"Last-Event-ID": last}
    with fresh.stream(
        "POST",
        f"{url}/v1/completions",
        json=body | {"stream": True},
        headers=headers,
        timeout=WAIT_S,
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("id: "):
                last = line[4:]
            elif line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                most -= 1
                if not most:
                    break
    return text, last


@pytest.mark.long
def test_a_standby_takes_over_with_the_workers_and_their_cache(pair: Pair) -> None:
    expected = [whole(pair.url, body)[0] for body in BODIES]
    status = [sys.executable, "-m", "moonpool", "status", pair.url]
    said = subprocess.run(status, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert "standby    127.0.0.1:" in said.stdout
    with pytest.raises(httpx.ConnectError):  # the standby serves nobody yet, so its port is closed
        fresh.get(pair.standby_url)
    drawn_text, drawn_id = first_events(pair.url, DRAWN, "0", 40)
    streams = [CutStream(pair.url, body) for body in BODIES[:2]]
    urls = [pair.url, pair.standby_url]
    lasting = [LastingStream(urls, "/v1/completions", body) for body in BODIES[1:]]
    wait_until(lambda: all(stream.text for stream in (*streams, *lasting)))
    pair.kill_first()
    for stream in streams:
        stream.thread.join(WAIT_S)
    assert all(stream.is_cut for stream in streams)
    wait_until(lambda: pair.instances(pair.standby_url) == ["d", "p"])
    for stream, body, text in zip(streams, BODIES, expected, strict=False):
        again, cached = whole(pair.standby_url, body)
        assert again == text
        assert again.startswith(stream.text)
        assert cached >= 280
    for stream in lasting:
        stream.thread.join(WAIT_S)
        assert len({(chunk["id"], chunk["created"]) for chunk in stream.chunks}) == 1
        assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [stream.text for stream in lasting] == expected[1:]
    # An answer that was drawn without a seed continues with the same draws.
    said, _ = first_events(pair.standby_url, DRAWN, drawn_id)
    seed = event_ids.last_event_id({b"last-event-id": drawn_id.encode()})
    assert seed is not None
    assert drawn_text + said == whole(pair.standby_url, DRAWN | {"seed": seed.seed})[0]
    assert pair.cluster(pair.standby_url)["head"]["epoch"] == 2
    assert [worker.poll() for worker in pair.workers] == [None, None]

    # The lost head starts again with its old settings. Its workers must stay at the standby, and
    # its log must say so.
    pair.first = pair.start_head()
    wait_until(lambda: is_replaced(pair.url))
    assert pair.instances(pair.url) == []
    assert pair.instances(pair.standby_url) == ["d", "p"]
    assert whole(pair.standby_url, BODIES[0])[0] == expected[0]


def is_replaced(url: str) -> bool:
    try:
        return "replaced" in fresh.get(f"{url}/ready", timeout=60).text
    except httpx.HTTPError:
        return False


def head_process_of(supervisor: int) -> int | None:
    for pid in children_of(supervisor):
        if "head-process" in command_of(pid):
            return pid
    return None


@pytest.mark.long
def test_a_head_that_its_supervisor_restarts_is_not_replaced(pair: Pair) -> None:
    head = head_process_of(pair.first.pid)
    assert head is not None
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: pair.instances(pair.url) == ["d", "p"])
    wait_until(lambda: len(pair.cluster(pair.url)["standbys"]) == 1)
    assert pair.standby.poll() is None
    with pytest.raises(httpx.ConnectError):
        fresh.get(pair.standby_url)


@pytest.mark.long
def test_a_cluster_has_one_standby_which_ends_with_it_in_order(pair: Pair) -> None:
    second = pair.start_standby(free_port())
    _, words = second.communicate(timeout=WAIT_S)
    assert second.returncode == 1
    assert "has a standby already" in words
    pair.first.send_signal(signal.SIGTERM)
    assert pair.first.wait(WAIT_S) == 0
    assert pair.standby.wait(WAIT_S) == 0
