"""`moonpool serve` in a process of its own, which ends with the command that started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence

from moonpool.children.parent import end_with
from moonpool.children.start import moonpool_line

HOST = "127.0.0.1"
LINES_KEPT = 200
LOOK_S = 0.1
VERBOSE = "`moonpool run --verbose` shows the log"
END_S = 20.0
"""How long the server may take for an orderly end."""


class ServerEndedError(RuntimeError):
    """The server has ended by itself; the text has its own last words."""


class BackgroundServer:
    """Starts with a `with` block, and ends with all its processes after it.

    It has a session of its own, so that Ctrl-C in the terminal ends an answer and not the server.
    `on_line` gets each line of its log, from a thread.
    """

    def __init__(self, arguments: Sequence[str], port: int, on_line: Callable[[str], None]) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        own_pid = os.getpid()
        place = ["--host", HOST, "--port", str(port)]
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            moonpool_line("serve", *arguments, *place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with(own_pid),
        )
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
        """Returns once the server answers, and calls `meanwhile` until then, a few times a second.
        Raises ServerEndedError.

        The supervisor listens long before there is a head, and the call waits at its socket.
        """
        with self._call(meanwhile) as call:
            while not select.select([call], [], [], LOOK_S)[0]:
                self.check()
                meanwhile()
            with contextlib.suppress(ConnectionResetError):
                if call.recv(64):
                    return
        self._process.wait(END_S)
        self.check()

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
            with contextlib.suppress(ConnectionRefusedError):
                call = socket.create_connection((HOST, self.port))
                call.sendall(
                    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                return call
            select.select([], [], [], LOOK_S / 5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            self._on_line(line)

    def _last_words(self) -> str:
        own = [line.removeprefix("moonpool: ") for line in self._lines if "moonpool: " in line[:10]]
        shown = own or [*self._lines][-5:] or ["its log is empty"]
        return " | ".join(shown).replace("see the log above", VERBOSE)


def choose_port(wanted: int) -> int:
    """Returns `wanted` if it is free, else a port that is."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                found: int = probe.getsockname()[1]
                return found
    return wanted  # the server then says why it cannot listen
