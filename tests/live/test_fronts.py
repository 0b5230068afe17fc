"""Fronts are processes that answer calls on one port. A kill of any front, or of the head, cuts no
answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.forked.commands import LocalServer
from tests.live import test_answers_go_on
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_answers_go_on import DRAWN, Got, Reader
from tests.live.test_faults import command_of, wait_until_gone
from tests.live.test_head_death import Streams, ask, bodies, events, head_of
from tests.live.test_parts import Part
from tests.live.test_standby import Pair
from tests.live.test_upgrade import Load, OneConnection, upgrade
from tests.live.vllm_stub import VllmStub
from tests.live.waiting import WAIT_S
from tests.processes import children_of

FRONTS = ["--fronts", "2"]
NUM_STREAMS = 8
MOST_KILLS = 4
FEW_KILLS = 2

pytestmark = pytest.mark.live


@pytest.fixture
def stub() -> Iterator[VllmStub]:
    made = VllmStub().start()
    yield made
    made.stop()


def fronts_of(server: LocalServer, count: int = 2) -> list[int]:
    """Waits until this many fronts run, and returns their processes."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        found = []
        for pid in children_of(server.pid):
            try:
                if "front-process" in command_of(pid):
                    found.append(pid)
            except OSError:
                continue
        if len(found) == count:
            return sorted(found)
        time.sleep(0.01)
    raise AssertionError(f"there are no {count} fronts")


def first_worker(server: LocalServer) -> int:
    until_s = time.monotonic() + WAIT_S
    while not (found := server.worker_pids()) and time.monotonic() < until_s:
        time.sleep(0.05)
    return found[0]


def counted(url: str, name: str) -> float:
    """Returns the sum of a counter over its labels."""
    text = fresh.get(f"{url}/metrics", timeout=WAIT_S).text
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def post_apart(url: str) -> int:
    """Posts from a process that listens on no port, because this process runs the stub."""
    code = "import sys, httpx; print(httpx.post(sys.argv[1], timeout=60).status_code)"
    line = [sys.executable, "-c", code, url]
    return int(subprocess.run(line, capture_output=True, check=True, timeout=WAIT_S).stdout)


def kill_while(streams: Streams, asked: list[Any], victim: Any, most: int) -> int:
    """Kills the process that `victim` returns when all streams have begun; kills again after some
    bytes, up to `most` times."""
    streamed = {number for number, (_, body) in enumerate(asked) if body["stream"]}
    num_kills, next_bytes = 0, 0
    while streams.are_running and num_kills < most:
        if streams.num_bytes < next_bytes or not streamed <= streams.begun:
            time.sleep(0.005)
            continue
        pid = victim(num_kills)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it died between the two lines
        wait_until_gone([pid])
        num_kills += 1
        next_bytes = streams.num_bytes + 10_000
    streams.join()
    return num_kills


@pytest.mark.long
@pytest.mark.parametrize(
    ("whose", "most"),
    [
        ("head", FEW_KILLS),
        pytest.param("head", MOST_KILLS, marks=pytest.mark.long),
        pytest.param("front", MOST_KILLS, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_killed_costs_no_answer(whose: str, most: int) -> None:
    line = [MODEL, "--prefill", "1", "--decode", "1", *SMALL, "--admission", "none", *FRONTS]
    with LocalServer(line) as server:
        asked = bodies()[:NUM_STREAMS]
        expected = [ask(server.url, path, body) for path, body in asked]
        pids = [*children_of(server.pid), server.pid]

        def victim(number: int) -> int:
            return fronts_of(server)[number % 2] if whose == "front" else head_of(server)

        num_kills = 0
        # repeats until a kill has hit: on a busy machine, streams may end before all have begun
        while not num_kills:
            streams = Streams(server.url, asked)
            num_kills = kill_while(streams, asked, victim, most)
            assert streams.errors == []
            assert [streams.got[number] for number in range(NUM_STREAMS)] == expected
        restarts = fresh.get(f"{server.url}/cluster", timeout=WAIT_S).json()["head"]["restarts"]
        assert restarts == (num_kills if whose == "head" else 0)
        pids += children_of(server.pid)
        assert server.stop() == 0
    assert wait_until_gone(pids) == []


@pytest.mark.long
@pytest.mark.parametrize("most", [FEW_KILLS, pytest.param(MOST_KILLS, marks=pytest.mark.long)])
def test_an_instance_that_is_killed_costs_no_answer(most: int) -> None:
    """Whether an answer continues whose tokens went to the fronts directly: the fronts know tokens
    that the head had not heard of."""
    line = [MODEL, "--mixed", "2", *SMALL, "--admission", "none", *FRONTS]
    with LocalServer(line) as server:
        asked = bodies()[:NUM_STREAMS]
        expected = [ask(server.url, path, body) for path, body in asked]
        num_kills = 0
        while not num_kills:
            streams = Streams(server.url, asked)
            num_kills = kill_while(streams, asked, lambda _: first_worker(server), most)
            assert streams.errors == []
            assert [streams.got[number] for number in range(NUM_STREAMS)] == expected
        fronts = fresh.get(f"{server.url}/cluster", timeout=WAIT_S).json()["fronts"]
        assert sum(front["direct_tokens"] for front in fronts) > 0


@pytest.mark.long
def test_a_client_that_comes_back_over_any_front_gets_the_rest() -> None:
    """Clients come back by request id and number of tokens, by their last event, and by request id
    alone. Each connection is new, so the kernel may give it to either front."""
    with LocalServer([MODEL, "--mixed", "1", *SMALL, *FRONTS]) as server:
        url = f"{server.url}/v1/completions"
        whole = Got()
        body = DRAWN | {"seed": 3, "max_tokens": 300}
        whole.read(url, body, "whole")
        for number in range(4):
            got = Got()
            got.read(url, body, f"part-{number}", most=40)
            computed = counted(server.url, "vllm:generation_tokens_total")
            got.read(url, body, f"part-{number}")
            assert (got.tokens, got.text) == (whole.tokens, whole.text)
            assert len(got.names) == 1, "one id and one time of creation"
            assert counted(server.url, "vllm:generation_tokens_total") - computed <= 300
        numbered = {"prompt": [7] * 50, "max_tokens": 200, "temperature": 1, "ignore_eos": True}
        seen = list(events(server.url, numbered, "0"))
        for _ in range(4):
            assert list(events(server.url, numbered, seen[120][0])) == seen[121:]


@pytest.mark.long
def test_one_page_of_metrics_and_one_cluster_whoever_answers(stub: VllmStub) -> None:
    stub.gap_s = 0.02
    with LocalServer(["--vllm", stub.url, *FRONTS]) as server:
        for number in range(12):
            body = {"model": "m", "prompt": [number + 1] * 20, "max_tokens": 5}
            answer = fresh.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
            assert answer.status_code == 200, answer.text
            name = answer.json()["id"]
            for _ in range(3):
                told = fresh.get(f"{server.url}/explain/{name}", timeout=WAIT_S)
                assert told.json()["outcome"] == "length"
        for _ in range(4):
            assert counted(server.url, "vllm:generation_tokens_total") == 60
            assert fresh.get(f"{server.url}/load", timeout=WAIT_S).json() == {"server_load": 0}
        cluster = fresh.get(f"{server.url}/cluster", timeout=WAIT_S).json()
        assert [front["front"] for front in cluster["fronts"]] == [0, 1]
        assert sum(front["tokens"] for front in cluster["fronts"]) == 60
        assert sum(front["direct_tokens"] for front in cluster["fronts"]) > 30, "not by the head"
        assert post_apart(f"{server.url}/reset_prefix_cache") == 200
        bad = fresh.post(f"{server.url}/v1/completions", json={"prompt": 5}, timeout=WAIT_S)
        assert bad.status_code == 400


@pytest.mark.long
def test_limits_hold_for_all_fronts_together(stub: VllmStub, tmp_path: Path) -> None:
    """Uses a bucket of ten calls: over new connections and both fronts, exactly ten calls pass at
    once."""
    keys = tmp_path / "keys"
    keys.write_text("k-ann ann requests_per_s=0.001\nk-tom tom tokens_per_s=0.05\nk-op admin\n")
    line = ["--vllm", stub.url, *FRONTS, "--api-key-file", str(keys)]
    with LocalServer(line) as server:
        statuses: Counter[int] = Counter()
        lock = threading.Lock()

        def call(key: str) -> None:
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "m", "prompt": [5] * 3, "max_tokens": 2}
            url = f"{server.url}/v1/completions"
            answer = fresh.post(url, json=body, headers=headers, timeout=WAIT_S)
            with lock:
                statuses[answer.status_code] += 1

        threads = [threading.Thread(target=call, args=("k-ann",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == {200: 1, 429: 15}
        statuses.clear()
        for _ in range(4):  # four calls of 5 tokens; the bucket gets one token in 20 s
            call("k-tom")
        assert statuses[200] < 4
        assert statuses[429] + statuses[200] == 4


@pytest.mark.long
def test_an_upgrade_replaces_the_fronts_too_and_costs_no_answer() -> None:
    with LocalServer([MODEL, "--mixed", "1", *SMALL, "--admission", "none", *FRONTS]) as server:
        load = Load(server.url)
        asking = OneConnection(server)
        former = [*fronts_of(server), head_of(server)]
        done = upgrade(server)
        num_right, num_answers = load.num_right, asking.num_answers
        load.end()
        asking.end()
        assert done.returncode == 0, done.stderr
        assert load.errors == []
        assert asking.error == ""
        assert asking.num_answers > num_answers, "the next front serves the connection, too"
        assert num_right, "answers ended while the processes were replaced"
        assert not {*fronts_of(server), head_of(server)} & {*former}
        assert wait_until_gone(former) == []


class FrontPair(Pair):
    """Runs two heads with fronts."""

    def start_head(self, *options: str) -> Part:
        return super().start_head(*FRONTS, *options)

    def start_standby(self, port: int) -> Part:
        ports = ["--head-port", str(free_port()), "--port", str(port)]
        return self.start("head", "--standby-of", f"127.0.0.1:{self.head_port}", *ports, *FRONTS)


@pytest.mark.long
def test_streams_go_on_at_a_standby_with_fronts() -> None:
    pair = FrontPair()
    try:
        test_answers_go_on.test_streams_go_on_at_a_standby_which_computes_only_the_rest(pair)
    finally:
        pair.end()


def test_answers_end_before_the_fronts_do() -> None:
    with LocalServer([MODEL, "--mixed", "1", *SMALL, *FRONTS, "--drain-seconds", "60"]) as server:
        readers = [Reader() for _ in range(4)]
        for number, reader in enumerate(readers):
            body = DRAWN | {"seed": number, "max_tokens": 200}
            reader.start(f"{server.url}/v1/completions", body, f"one-{number}")
        while not all(reader.tokens for reader in readers):
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGTERM)
        for reader in readers:
            reader.thread.join(WAIT_S)
        assert [len(reader.tokens) for reader in readers] == [200] * 4
        assert not any(reader.is_cut for reader in readers)


@pytest.mark.long
def test_calls_go_to_both_fronts(stub: VllmStub) -> None:
    with LocalServer(["--vllm", stub.url, *FRONTS]) as server:
        stub.may_speak.clear()
        body = {"model": "m", "prompt": [3] * 4, "max_tokens": 4, "stream": True}
        texts: list[str] = []

        def read() -> None:
            with fresh.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S
            ) as answer:
                texts.append("".join(answer.iter_text()))

        def shares() -> list[int]:
            cluster = fresh.get(f"{server.url}/cluster", timeout=WAIT_S).json()
            return [front["requests_under_way"] for front in cluster["fronts"]]

        threads: list[threading.Thread] = []
        found = [0, 0]
        until_s = time.monotonic() + WAIT_S
        # On a busy machine one front may not run while 24 calls arrive.
        while not all(found) and len(threads) < 10 * 24:
            for _ in range(24):
                threads.append(threading.Thread(target=read))
                threads[-1].start()
            while sum(found := shares()) < len(threads) and time.monotonic() < until_s:
                time.sleep(0.05)
        stub.may_speak.set()
        for thread in threads:
            thread.join()
        assert sum(found) == len(threads)
        assert all(found)
        lines = [[line[6:] for line in text.splitlines() if '"text":' in line] for text in texts]
        said = {"".join(json.loads(line)["choices"][0]["text"] for line in each) for each in lines}
        assert len(texts) == len(threads)
        # All clients have the same text, in as many events as batches of tokens arrived.
        assert len(said) == 1, said
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
