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
"""Is longer than any wait on a slow and busy machine: no test may fail by time alone."""


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
    """Whether no request is under way, and no instance holds a block or lacks a block with a lost
    arena."""

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
