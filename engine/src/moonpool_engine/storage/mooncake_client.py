"""Runs the Mooncake Store's client in a process, and starts it again when it fails.

    starting --ready--> up --no reply in time, its end, or a lost master--> down --pause--> starting

While the process is down every call fails at once, which its caller treats as a miss. A call never
exceeds its timeout. Each calling thread has its own channel (a socket pair) to the process
(`mooncake_client_process`).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from moonpool.config.tables import MooncakeConfig
from moonpool.types import MALFORMED
from moonpool_engine.storage import mooncake_client_process
from moonpool_engine.storage.mooncake_client_process import (
    MAX_MESSAGE_BYTES,
    MooncakeReady,
    MooncakeSetup,
    StoreRequest,
)

START_S = 20.0
"""How long the client may take to find the master; its own timeout is 90 s."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
MASTER_LOST = -900
_log = logging.getLogger(__name__)


class MooncakeClientError(Exception):
    """A call failed; the text is one line."""


class MooncakeClient:
    """`staging` is a descriptor of the memory that both processes map. Thread-safe."""

    def __init__(
        self,
        config: MooncakeConfig,
        local_hostname: str,
        staging: int,
        staging_bytes: int,
        num_channels: int,
    ) -> None:
        self._config = config
        self._hostname = local_hostname
        self._staging, self._staging_bytes = staging, staging_bytes
        self._num_channels = num_channels
        self._tried = threading.Event()
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the fields below
        self._channels: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._why_down = "its client has not started yet"
        # The kernel ends the process when the thread that started it ends.
        self._supervisor = threading.Thread(
            target=self._supervise, name="mooncake-client", daemon=True
        )

    def start(self) -> None:
        """Starts the process. Raises MooncakeClientError if the store cannot be reached; call
        `close` in either case."""
        self._supervisor.start()
        self._tried.wait()
        with self._lock:
            if not self._channels:
                raise MooncakeClientError(self._why_down)

    @property
    def pid(self) -> int | None:
        """The id of the process while it is up."""
        with self._lock:
            return self._process.pid if self._process is not None and self._channels else None

    def call(self, channel: int, request: StoreRequest, timeout_s: float) -> list[int]:
        """Sends a request and returns one code per name. Raises MooncakeClientError."""
        with self._lock:
            if not self._channels:
                raise MooncakeClientError(self._why_down)
            sock = self._channels[channel]
        try:
            sock.settimeout(timeout_s)
            sock.send(msgspec.msgpack.encode(request))
            reply = sock.recv(MAX_MESSAGE_BYTES)
            if not reply:
                raise ConnectionError("its client ended")
            codes = msgspec.msgpack.decode(reply, type=list[int])
        except TimeoutError:
            raise self._fail(sock, f"no reply within {timeout_s:.1f} s") from None
        except (OSError, *MALFORMED) as error:
            raise self._fail(sock, str(error)) from None
        if MASTER_LOST in codes or len(codes) != len(request.names):
            raise self._fail(sock, "its master does not respond")
        return codes

    def close(self) -> None:
        self._closing.set()
        self._end("it was closed")
        self._failed.set()
        if self._supervisor.ident is not None:
            self._supervisor.join(START_S)

    def _fail(self, sock: socket.socket, reason: str) -> MooncakeClientError:
        """Ends the process, unless a new one has replaced it already."""
        text = f"the Mooncake Store at {self._config.master_server_address} is gone: {reason}"
        with self._lock:
            current = sock in self._channels
        if current:
            self._end(text)
            self._failed.set()
        return MooncakeClientError(text)

    def _end(self, why: str) -> None:
        with self._lock:
            channels, self._channels = self._channels, []
            if channels and not self._closing.is_set():
                _log.warning("%s; blocks are computed instead of loaded", why)
            self._why_down = why
            if self._process is not None:
                self._process.kill()
        for channel in channels:
            channel.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for a reply

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            error = self._launch()
            if error:
                with self._lock:
                    self._why_down = error
            self._tried.set()
            if not error:
                self._failed.wait()
                if time.monotonic() - began_s > LAST_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
            self._failed.clear()
            self._reap()
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _launch(self) -> str:
        """Starts the process. Returns why it failed, or "" on success."""
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for _ in range(self._num_channels)
        ]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        try:
            process = self._spawn(theirs)
        finally:
            for sock in theirs:
                sock.close()
        error = self._await_ready(ours[0])
        with self._lock:
            self._process = process
            if not error and not self._closing.is_set():
                self._channels = ours
                return ""
        process.kill()
        for sock in ours:
            sock.close()
        return error

    def _spawn(self, channels: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
        config = self._config
        fds = tuple(channel.fileno() for channel in channels)
        setup = MooncakeSetup(
            local_hostname=self._hostname,
            metadata_server=config.metadata_server,
            global_segment_size=config.global_segment_size,
            protocol=config.protocol,
            device_name=config.device_name,
            master_server_address=config.master_server_address,
            sockets=fds,
            staging=self._staging,
            staging_bytes=self._staging_bytes,
            parent=os.getpid(),
        )
        command = [sys.executable, "-m", mooncake_client_process.__name__]
        return subprocess.Popen(  # noqa: S603 - ourselves, and fixed arguments
            [*command, msgspec.json.encode(setup).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(*fds, self._staging),
        )

    def _await_ready(self, channel: socket.socket) -> str:
        where = f"the Mooncake Store at {self._config.master_server_address}"
        channel.settimeout(START_S)
        try:
            reply = channel.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            return (
                f"{where} did not respond within {START_S:.0f} s; is its mooncake_master running?"
            )
        except OSError as error:
            return f"{where} cannot be used: {error}"
        if not reply:
            return f"{where} cannot be used: its client ended while it connected"
        return msgspec.json.decode(reply, type=MooncakeReady).error

    def _reap(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
