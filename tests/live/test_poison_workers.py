"""A request that crashes its instance ends at most two instances; the other requests continue
complete and right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.forked.commands import ForkedCommand, LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import wait_for_instances
from tests.live.test_head_death import CLIENT_S, Streams, ask

pytestmark = pytest.mark.live

POISON = 299
SCRIPT = f"""
import os, sys
from moonpool.cli.main import main
from moonpool_engine.engine.runner import Engine

step = Engine.step

def crashing(self, entries, *arguments):
    if any(list(entry.new_token_ids[:3]) == [{POISON}] * 3 for entry in entries):
        os.abort()
    return step(self, entries, *arguments)

Engine.step = crashing
sys.argv[0] = "moonpool"
main()
"""


class FragileServer(LocalServer):
    """Runs a server whose engines crash in a step with the poison."""

    def start(self, line: list[str], log: int, environment: dict[str, str]) -> Any:
        return ForkedCommand(line[3:], log, log, environment, script=SCRIPT)


@pytest.fixture(params=[["--mixed", "1"], ["--prefill", "1", "--decode", "1"]], ids=["1M", "1P+1D"])
def server(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    with FragileServer([MODEL, *request.param, *SMALL, "--admission", "none"]) as started:
        yield started


def test_a_request_that_crashes_its_engine_ends_two_and_no_more(server: LocalServer) -> None:
    calls = [
        (
            "/v1/completions",
            {"prompt": [n] * 40, "max_tokens": 300, "ignore_eos": True, "stream": True}
            | {"temperature": 1, "seed": n},
        )
        for n in range(1, 5)
    ]
    expected = [ask(server.url, *call) for call in calls]
    streams = Streams(server.url, calls)
    while len(streams.begun) < len(calls):
        time.sleep(0.005)
    poison = {"prompt": [POISON] * 60, "max_tokens": 4, "temperature": 0}
    answer = fresh.post(f"{server.url}/v1/completions", json=poison, timeout=CLIENT_S)
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "instances_ended"
    assert answer.headers["x-should-retry"] == "false"
    streams.join()
    assert streams.errors == []
    assert [streams.got[n] for n in range(len(calls))] == expected
    again = fresh.post(f"{server.url}/v1/completions", json=poison, timeout=CLIENT_S)
    assert (again.status_code, again.json()["error"]["code"]) == (500, "head_failed")
    assert server.last_words(100).count("ended with code -6") == 2


@pytest.mark.long
def test_kills_from_outside_make_no_request_guilty(server: LocalServer) -> None:
    body = {"prompt": [3] * 40, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    expected = ask(server.url, "/v1/completions", body | {"stream": True})
    streams = Streams(server.url, [("/v1/completions", body | {"stream": True})] * 3)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        num_instances = len(server.instances())
        for _ in range(4):
            if not streams.are_running:
                break
            killed = server.instances()[-1]["pid"]
            os.kill(killed, signal.SIGKILL)
            before = streams.num_bytes
            while killed in server.worker_pids():
                time.sleep(0.01)
            assert wait_for_instances(client, num_instances)
            while streams.are_running and streams.num_bytes == before:
                time.sleep(0.01)
    streams.join()
    assert streams.errors == []
    assert list(streams.got.values()) == [expected] * 3
