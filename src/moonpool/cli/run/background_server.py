"""Runs `moonpool serve` in a separate process, which ends with the command that started it.

The process is forked, because a new interpreter would first import again what this process has.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from moonpool.children.parent import end_with
from moonpool.children.process import ForkedChild
from moonpool.children.start import moonpool_line

HOST = "127.0.0.1"
LINES_KEPT = 200
LOOK_S = 0.1
VERBOSE = "`moonpool run --verbose` shows the log"
END_S = 20.0
"""How long the server may take for an orderly end."""


class ServerEndedError(RuntimeError):
    """The server has ended without being told; the text has its last log lines."""


class BackgroundServer:
    """Starts with a `with` block, and ends with all its processes after it.

    The server has a separate session, so that Ctrl-C in the terminal ends an answer and not the
    server. `on_line` gets each line of the server's log, from a thread.
    """

    def __init__(self, arguments: Sequence[str], port: int, on_line: Callable[[str], None]) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        place = ["--host", HOST, "--port", str(port)]
        self._process, self._log_fd = _fork(["serve", *arguments, *place])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()  # the kernel then ends head and workers
            self._process.wait()

    def wait_until_ready(self, meanwhile: Callable[[], None]) -> None:
        """Returns once the server answers; calls `meanwhile` a few times a second until then.
        Raises ServerEndedError.

        The supervisor listens long before there is a head, and the call waits at its socket.
        """
        while True:
            with self._call(meanwhile) as call, contextlib.suppress(ConnectionResetError):
                while not select.select([call], [], [], LOOK_S)[0]:
                    self.check()
                    meanwhile()
                if call.recv(64):
                    return
            select.select([], [], [], LOOK_S)  # the head has ended, and the next head may answer

    def check(self) -> None:
        """Raises ServerEndedError if the server has ended."""
        if self._process.poll() is not None:
            self._reader.join(END_S)
            raise ServerEndedError(self._last_words())

    def wait(self) -> None:
        """Returns when the server has ended."""
        self._process.wait()

    def _call(self, meanwhile: Callable[[], None]) -> socket.socket:
        while True:
            self.check()
            meanwhile()
            with contextlib.suppress(ConnectionError):
                call = socket.create_connection((HOST, self.port))
                call.sendall(
                    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                return call
            select.select([], [], [], LOOK_S / 5)

    def _read(self) -> None:
        with open(self._log_fd, errors="replace") as log:
            for raw in log:
                line = raw.rstrip()
                self._lines.append(line)
                self._on_line(line)

    def _last_words(self) -> str:
        own = [line.removeprefix("moonpool: ") for line in self._lines if "moonpool: " in line[:10]]
        shown = own or [*self._lines][-5:] or ["its log is empty"]
        return " | ".join(shown).replace("see the log above", VERBOSE)


def _fork(line: list[str]) -> tuple[ForkedChild, int]:
    """Forks a process that runs this command line in a session of its own. Returns the process, and
    a descriptor from which its output comes."""
    own_pid = os.getpid()
    log_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _become_server(line, own_pid, log_fd, write_fd)
    os.close(write_fd)
    return ForkedChild(pid), log_fd


def _become_server(line: list[str], own_pid: int, log_fd: int, write_fd: int) -> NoReturn:
    """Runs in the forked process."""
    os.setsid()
    end_with(own_pid)
    for own in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(own, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, write_fd, write_fd)):
        os.dup2(fd, number)
    for fd in (null, write_fd, log_fd):
        os.close(fd)
    _run(line)


def _run(line: list[str]) -> NoReturn:
    """Ends this process with the command."""
    import setproctitle  # imported here, because only a serving process and the fork server need it

    from moonpool.cli.main import main
    from moonpool.head.fork_server import end_quickly

    setproctitle.setproctitle(" ".join([*moonpool_line(), *line]))
    status: object = 1
    try:
        main(args=line, prog_name="moonpool")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    end_quickly(status)


def choose_port(wanted: int) -> int:
    """Returns `wanted` if it is free, or else a free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                found: int = probe.getsockname()[1]
                return found
    return wanted  # the server then tells why it cannot listen
