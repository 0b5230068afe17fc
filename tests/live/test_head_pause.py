"""A head is stopped, as on a paused machine: its workers live on, and no answer is cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import LONG
from tests.live.test_hangs import ask
from tests.live.test_parts import Parts
from tests.live.waiting import WAIT_S

# longer than one turn of the loop may count, and longer than an idle worker's heartbeats
SILENCE_S = 6.0
IMPATIENT = f"""
import sys
from moonpool.cli.main import main
from moonpool.head import head
from moonpool.children import stopped

head.SILENCE_S = {SILENCE_S}
stopped.MOST_LOOKS = 1 << 30  # a paused machine does not show its processes as stopped
sys.argv[0] = "moonpool"
main()
"""


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.end()


@pytest.mark.long
def test_a_head_that_stood_still_kills_no_worker_and_cuts_no_answer(parts: Parts) -> None:
    line = ["serve", MODEL, "--prefill", "1", "--decode", "1", *SMALL, "--port", str(parts.port)]
    parts.start_script(IMPATIENT, *line)
    client = parts.wait_until_healthy()
    expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    before = [instance["pid"] for instance in client.get("/cluster").json()["instances"]]
    got: dict[str, Any] = {}
    threads = [ask(client, f"paused-{number}", got) for number in range(3)]
    started(client, "paused-0")
    pid = client.get("/cluster").json()["head"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * SILENCE_S)
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    texts = [answer["choices"][0]["text"] for answer in got.values()]
    assert texts == [expected] * 3
    time.sleep(1.0)  # gives the head time to tick again
    after = [instance["pid"] for instance in client.get("/cluster").json()["instances"]]
    assert after == before


def started(client: httpx.Client, name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if client.get(f"/explain/{name}").json().get("generated_tokens", 0) > 5:
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} has not begun")
