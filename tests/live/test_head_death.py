"""The head is killed again and again: every answer continues complete and right, and no process or
block is left."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from benchmarks.suite.live.kills.calls import Body, calls, texts_of
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import (
    command_of,
    shared_memory_names,
    wait_for_instances,
    wait_until_gone,
)
from tests.live.waiting import WAIT_S
from tests.processes import children_of

NUM_STREAMS = 16
FEW = (8, 2)
"""Holds the streams, one of each kind, and the number of kills of the short run."""
MANY = (NUM_STREAMS, 5)
CLIENT_S = 240.0


def bodies() -> list[tuple[str, Body]]:
    return calls(NUM_STREAMS, seed=11)


def ask(
    url: str, path: str, body: Body, note: Callable[[int], None] = lambda size: None
) -> dict[Any, str]:
    """Sends a call, and returns its texts by choice. Fails unless the response is complete."""
    with fresh.stream("POST", url + path, json=body, timeout=CLIENT_S) as response:
        raw = b""
        for part in response.iter_raw():  # raises if the chunks do not fit together
            raw += part
            note(len(part))
    assert response.status_code == 200, raw
    return texts_of(path, body, raw)


def head_of(server: LocalServer) -> int:
    """Waits until a head runs, and returns its process."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for pid in children_of(server.pid):
            try:
                if "head-process" in command_of(pid):
                    return pid
            except OSError:
                continue
        time.sleep(0.01)
    raise AssertionError("there is no head")


class Streams:
    """Holds calls that run side by side, and the bytes that they have received."""

    def __init__(self, url: str, calls: list[tuple[str, Body]]) -> None:
        self.num_bytes = 0
        self.begun: set[int] = set()  # the calls that have received a byte
        self.got: dict[int, dict[Any, str]] = {}
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number, url, *call))
            for number, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, url: str, path: str, body: Body) -> None:
        try:
            self.got[number] = ask(url, path, body, partial(self._note, number))
        except Exception as error:
            self.errors.append(f"{number} {path}: {error!r}")

    def _note(self, number: int, size: int) -> None:
        with self._lock:
            self.num_bytes += size
            self.begun.add(number)

    @property
    def are_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(CLIENT_S)


def cached_tokens(url: str, prompt: list[int]) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = fresh.post(f"{url}/v1/completions", json=body, timeout=CLIENT_S).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def kill_under_streams(
    server: LocalServer, asked: list[Any], expected: list[Any], most: int
) -> tuple[int, Streams]:
    """Kills the head up to `most` times while streams run; returns the number of kills."""
    drawn = random.Random(5)
    streamed = {number for number, (_, body) in enumerate(asked) if body["stream"]}
    streams = Streams(server.url, asked)
    num_kills, next_bytes = 0, 0
    while streams.are_running and num_kills < most:
        # A connection that was just accepted ends with its head.
        if streams.num_bytes < next_bytes or not streamed <= streams.begun:
            time.sleep(0.005)
            continue
        head = head_of(server)
        os.kill(head, signal.SIGKILL)
        num_kills += 1
        next_bytes = streams.num_bytes + drawn.randrange(2_000, 30_000)
        if num_kills % 2:  # this call arrives while there is no head
            assert ask(server.url, *asked[0]) == expected[0]
        wait_until_gone([head])
    streams.join()
    return num_kills, streams


APART = ["--prefill", "1", "--decode", "1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrangement", "counts"),
    [
        (APART, FEW),
        pytest.param(APART, MANY, marks=pytest.mark.long),
        pytest.param(["--mixed", "2"], MANY, marks=pytest.mark.long),
    ],
    ids=["1P+1D", "1P+1D-many", "2M"],
)
def test_a_head_that_is_killed_costs_no_answer(
    arrangement: list[str], counts: tuple[int, int]
) -> None:
    before = shared_memory_names()
    num_streams, most_kills = counts
    with LocalServer([MODEL, *arrangement, *SMALL, "--admission", "none"]) as server:
        asked = bodies()[:num_streams]
        expected = [ask(server.url, path, body) for path, body in asked]
        workers = sorted(server.worker_pids())
        all_pids = children_of(server.pid)
        num_kills = 0
        # repeats until a kill has hit: on a busy machine, streams may end before all have begun
        while not num_kills:
            num_kills, streams = kill_under_streams(server, asked, expected, most_kills)
            assert streams.errors == []
            assert [streams.got[number] for number in range(num_streams)] == expected
        cluster = fresh.get(f"{server.url}/cluster", timeout=60).json()
        assert cluster["head"]["restarts"] == num_kills
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert wait_for_instances(client, 2)
        assert sorted(server.worker_pids()) == workers
        prompt = asked[5][1]["prompt"]
        assert cached_tokens(server.url, prompt) >= len(prompt) - 32
        all_pids += [*children_of(server.pid), server.pid]
        assert server.stop() == 0
    assert wait_until_gone(all_pids) == []
    assert shared_memory_names() <= before


def test_calls_that_arrive_and_embeddings_outlive_a_head() -> None:
    """Cuts a call within the header, within the body, or before a body that the server has asked
    the client for."""
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        completion = {"prompt": [5] * 3000, "max_tokens": 8, "temperature": 0, "seed": 1}
        texts = {"input": [f"{number} " * 40 for number in range(60)]}
        wholes = [
            raw_call("/v1/completions", completion),
            raw_call("/v1/completions", completion),
            raw_call("/v1/completions", completion, "Expect: 100-continue"),
            raw_call("/v1/embeddings", texts),
            raw_call("/tokenize", {"prompt": "ab" * 5000}),
        ]
        cuts = [20, len(wholes[1]) - 5000, wholes[2].index(b"\r\n\r\n") + 4, len(wholes[3]), 700]
        expected = [RawCall(server.url, whole).send(whole).content() for whole in wholes]
        calls = [RawCall(server.url, whole) for whole in wholes]
        calls[0].send(wholes[4])  # uses a connection that has already answered a call
        assert calls[0].content() == expected[4]
        for call, cut in zip(calls, cuts, strict=True):
            call.send(call.whole[:cut])
        assert calls[2].lines.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert calls[2].lines.readline() == b"\r\n"
        for ahead in (100, 100):
            time.sleep(0.2)  # gives the head time to read the calls
            head = head_of(server)
            os.kill(head, signal.SIGKILL)
            wait_until_gone([head])
            head_of(server)
            for number in (1, 4):
                calls[number].send(wholes[number][cuts[number] : cuts[number] + ahead])
                cuts[number] += ahead
        for number, call in enumerate(calls):
            call.send(wholes[number][cuts[number] :])
            assert call.content() == expected[number], number
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.get("/cluster").json()["head"]["restarts"] == 2


def raw_call(path: str, body: Body, *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: here", "X-Request-Id: cut", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


class RawCall:
    """Sends the bytes of a call piece by piece."""

    def __init__(self, url: str, whole: bytes) -> None:
        self.whole = whole
        parts = httpx.URL(url)
        self._socket = socket.create_connection((parts.host, parts.port or 80), CLIENT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines = self._socket.makefile("rb")

    def send(self, data: bytes) -> RawCall:
        self._socket.sendall(data)
        return self

    def content(self) -> Any:
        """Returns the response's content without the fields that differ from call to call."""
        status = self.lines.readline()
        if b" 100 " in status:
            self.lines.readline()
            status = self.lines.readline()
        length = 0
        while (line := self.lines.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name == b"content-length" else length
        assert b" 200 " in status, (status, self.lines.read(length))
        found = json.loads(self.lines.read(length))
        for name in ("id", "created", "usage"):
            found.pop(name, None)
        return found


@pytest.mark.long
def test_a_stream_that_goes_on_by_its_last_event_outlives_a_head_too() -> None:
    """The head is killed while it recomputes the tokens that the client has, and once more after
    that."""
    body = {"prompt": [7] * 50, "max_tokens": 600, "temperature": 1, "ignore_eos": True}
    with LocalServer([MODEL, "--mixed", "1", *SMALL]) as server:
        whole = list(events(server.url, body, "0"))
        last = whole[400][0]
        assert list(events(server.url, body, last)) == whole[401:]
        got = []
        killer = threading.Timer(0.1, lambda: os.kill(head_of(server), signal.SIGKILL))
        killer.start()
        for event in events(server.url, body, last):
            got.append(event)
            if len(got) == 50:
                os.kill(head_of(server), signal.SIGKILL)
        assert got == whole[401:]
        killer.join()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.get("/cluster").json()["head"]["restarts"] == 2


def events(url: str, body: Body, last: str) -> Iterator[tuple[str, str]]:
    """Yields the events of a stream after the event with the id `last`, each with its id."""
    headers, found = {"Last-Event-ID": last}, ""
    body = body | {"stream": True}
    with fresh.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=CLIENT_S
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("id: "):
                found = line
            elif line.startswith("data: "):
                yield found[4:], line


@pytest.mark.long
def test_a_head_that_a_signal_has_stopped_is_replaced() -> None:
    with LocalServer([MODEL, "--mixed", "1", *SMALL]) as server:
        asked = bodies()[4:8]
        expected = [ask(server.url, path, body) for path, body in asked]
        streams = Streams(server.url, asked)
        while not streams.num_bytes:
            time.sleep(0.005)
        head = head_of(server)
        os.kill(head, signal.SIGSTOP)
        streams.join()
        assert streams.errors == []
        assert [streams.got[number] for number in range(len(asked))] == expected
        assert wait_until_gone([head]) == []
        assert "the head is stopped by a signal (SIGSTOP); killing it" in server.last_words(200)
