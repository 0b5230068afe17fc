"""Processes hang without dying: their requests continue elsewhere, and the hung processes are
killed in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.protocol.frames import SILENCE_S
from moonpool.protocol.supervision import HUNG_STATUS
from tests.live.test_faults import LONG, wait_until_gone
from tests.live.test_parts import Parts
from tests.live.test_stages import stages_of
from tests.live.waiting import WAIT_S

HANGING = """
import signal, sys, threading
from moonpool.cli.main import main
from moonpool_engine.engine.parallel.pipeline import PipelineEngine

hangs = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: hangs.set())
run_first = PipelineEngine._run_first

def caught(self, *arguments):
    if hangs.is_set():
        threading.Event().wait()
    run_first(self, *arguments)

PipelineEngine._run_first = caught
sys.argv[0] = "moonpool"
main()
"""


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    for process in made.processes:
        for stage in stages_of(process.pid):
            # kills the stage, because a stopped process does not notice the end of its worker
            os.kill(stage, signal.SIGKILL)
    made.end()


def ask(client: httpx.Client, name: str, got: dict[str, Any]) -> threading.Thread:
    def run() -> None:
        headers = {"X-Request-Id": name}
        answer = client.post("/v1/completions", json=LONG, headers=headers, timeout=60)
        got[name] = answer.json()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def decode_on_all(client: httpx.Client, victims: set[str], got: dict[str, Any]) -> list[Any]:
    """Begins more and more answers, until each of the victims decodes an answer of the last burst.
    An instance that the Conductor believes slower gets answers only when the other instances are
    busy."""
    threads: list[threading.Thread] = []
    chosen: set[str] = set()
    for burst in range(6):
        names = [f"hang-{burst}-{number}" for number in range(12)]
        threads += [ask(client, name, got) for name in names]
        chosen = {decoder_of(client, name) for name in names}
        if victims <= chosen:
            return threads
    raise AssertionError(f"nothing is decoded on {victims - chosen}")


def decoder_of(client: httpx.Client, name: str) -> str:
    """Returns the instance that decodes the answer, once decoding has begun."""
    found: dict[str, Any] = {}
    deadline = time.monotonic() + WAIT_S
    while not found.get("generated_tokens") and time.monotonic() < deadline:
        found = client.get(f"/explain/{name}").json()
    return str(found.get("decode_instance"))


@pytest.mark.long
def test_what_stands_still_costs_no_answer_and_ends_in_time(parts: Parts, tmp_path: Path) -> None:
    """Hangs a stage, a process, and an engine's thread in a call, one instance of each. A fourth
    instance runs on."""
    # The remaining instance has to answer all requests, on a machine that may be busy.
    patient = ["--admission", "none", "--slo-ttft", "100", "--slo-tbt", "10"]
    # Three instances hang at once, and until the head notices, it may place a request on one after
    # the other.
    config = tmp_path / "moonpool.toml"
    # All instances decode equally fast, and the Conductor expects that, so answers go to all of
    # them.
    config.write_text("[conductor]\nmax_attempts = 5\nlearning = false\n")
    parts.start_head(*patient, "--kv-tokens", "131072", "--config", str(config))
    parts.start_worker("prefill", "p")
    head = f"127.0.0.1:{parts.head_port}"
    stages = ["--pipeline-parallel-size", "2"]
    worker = ["worker", "--role", "decode", "--head", head, *stages, "--name"]
    staged = parts.start(*worker, "staged")
    stopped = parts.start(*worker, "stopped")
    caught = parts.start_script(HANGING, *worker, "caught")
    parts.start(*worker, "sound")
    client = parts.wait_until_healthy()
    deadline = time.monotonic() + WAIT_S
    while len(client.get("/cluster").json()["instances"]) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    right = client.post("/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
    got: dict[str, Any] = {}
    threads = decode_on_all(client, {"staged", "stopped", "caught"}, got)
    (stage,) = stages_of(staged.pid)
    os.kill(stage, signal.SIGSTOP)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(caught.pid, signal.SIGUSR1)
    began_s = time.monotonic()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(got) == len(threads)
    errors = [answer["error"] for answer in got.values() if "error" in answer]
    assert not errors
    assert {answer["choices"][0]["text"] for answer in got.values()} == {right}
    assert time.monotonic() - began_s > SILENCE_S / 2, "nothing hung"
    ends = ((staged, 1, "the instance ends with it"), (caught, HUNG_STATUS, "the engine hangs"))
    for process, status, last in ends:
        _, words = process.communicate(timeout=60)
        assert process.returncode == status
        assert last in words.splitlines()[-1]
    assert wait_until_gone([stage]) == []
    os.kill(stopped.pid, signal.SIGCONT)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        alive = {i["instance_id"] for i in client.get("/cluster").json()["instances"]}
        if alive == {"p", "stopped", "sound"}:
            return
        time.sleep(0.1)
    raise AssertionError(f"{alive}: one that was only stopped comes back, the others do not")
