"""Serves with one instance of each role, the default: the death of an instance delays answers, but
refuses or cuts none."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import LONG, wait_until_gone
from tests.live.test_hangs import ask
from tests.live.test_head_pause import started


def pid_of(client: httpx.Client, name: str, wait_s: float = 60.0, other_than: int = 0) -> int:
    """Returns the instance's process when a process other than `other_than` is up."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        for instance in client.get("/cluster").json()["instances"]:
            if instance["instance_id"] == name and instance["pid"] != other_than:
                return int(instance["pid"])
        time.sleep(0.1)
    raise AssertionError(f"{name} is not up")


@pytest.mark.long
def test_requests_wait_for_the_only_instance_of_a_role() -> None:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        for role in ("decode", "prefill"):
            got: dict[str, Any] = {}
            threads = [ask(client, f"{role}-running", got)]
            started(client, f"{role}-running")
            pid = pid_of(client, f"{role}-0")
            os.kill(pid, signal.SIGKILL)
            assert wait_until_gone([pid]) == []
            threads += [ask(client, f"{role}-new-{number}", got) for number in range(3)]
            for thread in threads:
                thread.join(60)
            assert [answer.get("error") for answer in got.values()] == [None] * 4
            assert {answer["choices"][0]["text"] for answer in got.values()} == {expected}


@pytest.mark.long
def test_an_instance_that_dies_again_and_again_comes_back_each_time() -> None:
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=120)
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        pid = 0
        for _ in range(7):
            pid = pid_of(client, "decode-0", other_than=pid)
            os.kill(pid, signal.SIGKILL)
        assert client.post("/v1/completions", json=LONG).json()["choices"][0]["text"] == expected
