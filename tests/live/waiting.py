"""Lets tests wait for events."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from tests.live.calls import fresh

T = TypeVar("T")
WAIT_S = 300.0
"""Longer than any wait on a slow and busy machine, because no test may fail only because of
time."""


def wait_until(holds: Callable[[], T | None], what: str = "", wait_s: float = WAIT_S) -> T:
    """Calls `holds` until its value is true, and returns the value. `what` is the message if the
    value stays false."""
    deadline = time.monotonic() + wait_s
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, what or f"still {found!r} after {wait_s:g} s"
        time.sleep(0.05)


def wait_until_idle(client: httpx.Client) -> None:
    """Waits until no request is under way, no instance holds a block, and no blocks are missing
    with a lost arena."""

    def is_idle() -> bool:
        state = client.get("/cluster").json()
        held = [instance["pool"].get("held", 1) for instance in state["instances"]]
        return state["requests_under_way"] == 0 and not any(held)

    wait_until(is_idle)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(httpx.HTTPError):
            if fresh.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])
