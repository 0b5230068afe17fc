"""Waits for a server that a test started by itself."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import httpx

from tests.live.calls import fresh


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(httpx.HTTPError):
            if fresh.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])
