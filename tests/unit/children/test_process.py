"""Tests forked children: their status, and signals to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from moonpool.children.process import ForkedChild, ForkedProcess
from moonpool.children.start import moonpool_line, start_child, start_child_here


def child(code: str) -> int:
    """Starts a Python for whose end no other code waits, and returns its process id."""
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)


def test_a_status_is_read_without_descriptors_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as on macOS, which has no such descriptors."""
    monkeypatch.delattr(os, "pidfd_open")
    waiting = ForkedChild(child("import time; time.sleep(60)"))
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGTERM)
    assert [waiting.wait(60), waiting.wait(), waiting.poll()] == [-signal.SIGTERM] * 3
    waiting.kill()  # does nothing, because the process has ended
    assert ForkedChild(child("raise SystemExit(7)")).wait() == 7


def test_a_status_is_read_the_same_with_a_loop_and_without() -> None:
    waiting = ForkedChild(child("import time; time.sleep(60)"))
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    assert waiting.returncode is None
    waiting.kill()
    assert [waiting.wait(60), waiting.wait(), waiting.returncode] == [-signal.SIGKILL] * 3
    waiting.kill()  # does nothing, because the process has ended
    assert ForkedChild(child("raise SystemExit(7)")).wait(60) == 7

    async def here() -> list[int | None]:
        ended = ForkedProcess(child("raise SystemExit(7)"))
        killed = ForkedProcess(child("import time; time.sleep(60)"))
        killed.send_signal(signal.SIGTERM)
        found: list[int | None] = [await ended.wait(), await killed.wait()]
        killed.kill()
        return [*found, ended.returncode]

    assert asyncio.run(here()) == [7, -signal.SIGTERM, 7]


SAY = """
import os, sys
leads, num_read = os.getsid(0) == os.getpid(), len(sys.stdin.read())
os.write(int(sys.argv[1]), b"%d %d" % (leads, num_read))
"""


@pytest.mark.parametrize("with_loop", [False, True])
def test_a_child_has_its_own_session_no_terminal_and_the_descriptors(with_loop: bool) -> None:
    reader, writer = os.pipe()
    line = [sys.executable, "-c", SAY, str(writer)]
    made: Any
    if with_loop:

        async def here() -> int:
            return await (await start_child(line, os.environ, (writer,))).wait()

        assert asyncio.run(here()) == 0
    else:
        made = start_child_here(line, os.environ, (writer,))
        assert made.wait(60) == 0
    assert os.read(reader, 100) == b"1 0"
    os.close(reader)
    os.close(writer)


def test_the_command_line_is_that_of_this_python() -> None:
    assert moonpool_line("serve", "x") == [sys.executable, "-m", "moonpool", "serve", "x"]
