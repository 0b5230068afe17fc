"""Starts `moonpool serve` as a process, for the demo, the benchmarks and the live tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from moonpool.children.start import moonpool_line


class ServerError(RuntimeError):
    """The server did not start or did not end; the text has the last lines of its log."""


class LocalServer:
    """Starts at the beginning of a `with` block; all its processes end with the block."""

    def __init__(
        self,
        arguments: Sequence[str],
        start_s: float = 180.0,
        port: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`port` 0 means any free port. `environment`: variables in addition to those of this
        process."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = moonpool_line("serve", *arguments)
        self._arguments += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
        self._start_s = start_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalServer:
        self._process = self.start(self._arguments, self._log.fileno(), self._environment)
        deadline = time.monotonic() + self._start_s
        try:
            while not self._is_healthy():
                if self._process.poll() is not None:
                    raise ServerError(f"the server did not start: {self.last_words()}")
                if time.monotonic() > deadline:
                    raise ServerError(f"the server is not up after {self._start_s:.0f} s")
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise
        return self

    def start(
        self, line: list[str], log: int, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts the command `line`, which writes to the file descriptor `log`."""
        return subprocess.Popen(  # noqa: S603 - our own command
            line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def instances(self) -> list[dict[str, Any]]:
        """Returns the instances that the head lists."""
        return self._listed("instances")

    def worker_pids(self) -> list[int]:
        return [instance["pid"] for instance in self.instances()]

    def attention_pids(self) -> list[int]:
        return [worker["pid"] for worker in self._listed("attention")]

    def _listed(self, of: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self._get("/cluster", 60.0)[1])[of]
        return found

    def stop(self, sign: signal.Signals = signal.SIGTERM, wait_s: float = 20.0) -> int:
        """Ends the server in order and returns its exit status. Raises ServerError if it hangs."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(sign)
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"the server did not end in {wait_s:.0f} s") from None

    def kill(self) -> None:
        """Sends SIGKILL to the head; the kernel then ends the workers."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def last_words(self, num_lines: int = 5) -> str:
        return " | ".join(self.log_lines()[-num_lines:]) or "its log is empty"

    def log_lines(self) -> list[str]:
        """Returns what the server and its workers have logged so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace").strip().splitlines()

    def _is_healthy(self) -> bool:
        try:
            return self._get("/health", 2.0)[0] == 200
        except (OSError, HTTPException):
            return False

    def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Returns status and body. httpx would read all certificates of this machine each time."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
