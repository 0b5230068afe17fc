"""Tests `moonpool top` on a real cluster: it shows one frame as text, or fills a terminal until the
key q."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner

from moonpool.cli.watch.top import top
from tests.forked.commands import LocalServer

PATIENCE_S = 300.0


def complete(http: httpx.Client, request_id: str) -> None:
    body = {"prompt": list(range(5, 105)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text


def test_once_shows_instances_and_the_request_just_served(http: httpx.Client) -> None:
    complete(http, "seen-in-top")
    environment = {"COLUMNS": "160"}
    until_s = time.monotonic() + PATIENCE_S
    while True:
        shown = CliRunner().invoke(top, [str(http.base_url), "--once"], env=environment)
        assert shown.exit_code == 0, shown.output
        row = next((line for line in shown.output.splitlines() if "seen-in-top" in line), "")
        if "length" in row or time.monotonic() > until_s:
            break
    assert "length" in row and "decode-" in row, shown.output
    for name in ("prefill-0", "decode-1", "TTFT", "fetched", "without an answer"):
        assert name in shown.output


def test_an_absent_server_is_one_line() -> None:
    gone = CliRunner().invoke(top, ["http://127.0.0.1:9"])
    assert gone.exit_code == 1
    assert gone.output.count("\n") == 1 and "no server answers" in gone.output


class Terminal:
    """Runs `moonpool top` with a pseudo terminal that it controls, so that Ctrl-C reaches it."""

    def __init__(self, url: str) -> None:
        self.number, inner = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "moonpool", "top", url],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
        )
        os.close(inner)
        self.text = ""

    def read_until(self, holds: Callable[[str], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds(self.text):
            assert time.monotonic() < until_s, self.text[-2000:]
            if select.select([self.number], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.number, 65536).decode(errors="replace")
                except OSError:  # fails if the process has closed its end
                    return

    def press(self, key: bytes) -> None:
        os.write(self.number, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.number)


@pytest.mark.long
@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_the_view_follows_the_cluster_and_a_key_ends_it(
    cluster: LocalServer, http: httpx.Client, key: bytes
) -> None:
    terminal = Terminal(cluster.url)
    name = f"watched-{key.hex()}"
    try:
        terminal.read_until(lambda text: "prefill-0" in text)
        complete(http, name)
        terminal.read_until(lambda text: name in text)
        terminal.press(key)
        terminal.read_until(lambda text: terminal.process.poll() is not None)
        assert terminal.process.wait(PATIENCE_S) == 0, terminal.text[-2000:]
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()
