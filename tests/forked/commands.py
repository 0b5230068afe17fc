"""Runs commands and servers of tests in forked processes."""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from moonpool_lab.demo import local_server

ROOT = Path(__file__).parents[2]
STOP_S = 120.0
"""The time within which each server ends, even on a slow and busy machine."""
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@cache
def _control() -> socket.socket:
    """Returns the connection to this process's command server, and starts the server if needed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked.command_server", str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | THREADS,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class ForkedCommand:
    """Runs a command in a process of its own, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: list[str],
        stdout: int,
        stderr: int,
        environment: dict[str, str] | None = None,
        script: str | None = None,
        passed: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """`arguments` are the words after `moonpool`. If there is a `script`, it runs instead of
        moonpool. `passed` is a file descriptor, whose number becomes the last word. `folder` is the
        working directory.
        """
        self.args = ["moonpool", *arguments]
        self.returncode: int | None = None
        order = {
            "arguments": arguments,
            "script": script,
            "environment": dict(environment or os.environ),
            "folder": str(folder or Path.cwd()),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        self._link, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as null:
            fds = [theirs.fileno(), null.fileno(), stdout, stderr]
            fds += [] if passed is None else [passed]
            socket.send_fds(_control(), [json.dumps(order).encode()], fds)
        self._told = self._link.makefile("rb")
        self.pid = int(self._told.readline())
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._link], [], [], timeout_s)[0]:
            self.returncode = int(self._told.readline())
            os.close(self._pidfd)
            self._told.close()
            self._link.close()
        return self.returncode


class LocalServer(local_server.LocalServer):
    """Runs a server whose supervisor is forked, unless the server has its own environment."""

    def __init__(
        self,
        arguments: Any,
        start_s: float = 180.0,
        port: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(arguments, start_s, port, environment)
        self._is_forked = environment is None

    def stop(self, sign: signal.Signals = signal.SIGTERM, wait_s: float = STOP_S) -> int:
        return super().stop(sign, wait_s)

    def start(self, line: list[str], log: int, environment: dict[str, str]) -> Any:
        if not self._is_forked:
            return super().start(line, log, environment)
        assert line[:3] == [sys.executable, "-m", "moonpool"]
        return ForkedCommand(line[3:], log, log, environment)


def begin_peer(line: Sequence[str], fd: int) -> ForkedCommand:
    """Replaces `spare_process.begin_spare`: starts a stage or rank in a forked process."""
    with open(os.devnull, "wb") as null:
        return ForkedCommand(list(line), null.fileno(), null.fileno(), passed=fd)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def run_command(
    *arguments: str, timeout_s: float = 60.0, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `moonpool` with these words to its end, like `subprocess.run`."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        command = ForkedCommand(list(arguments), stdout.fileno(), stderr.fileno(), folder=folder)
        try:
            command.wait(timeout_s)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise
        assert command.returncode is not None
        return subprocess.CompletedProcess(
            command.args, command.returncode, _read(stdout), _read(stderr)
        )
