"""Starts the process of the Mooncake Store's client, and starts it again when it fails.

    started --ready--> up --no answer in time, an end, or a lost master--> down --a pause--> started

While it is down every call fails at once: to whoever asks, that is a miss. A call never takes
longer than it is given. Each caller's thread has a lane (a socket pair) of its own.
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

from moonpool.config import MooncakeConfig
from moonpool.messenger.store import mooncake_child
from moonpool.messenger.store.mooncake_child import MAX_MESSAGE_BYTES, Ask, Ready, Start

START_S = 20.0
"""So long its client may take to find the master; left to itself it takes 90 s."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
MASTER_LOST = -900
_log = logging.getLogger(__name__)


class HelperError(Exception):
    """Nothing came of a call; one line says why."""


class Helper:
    """`staging` is a descriptor of the memory that both processes see. Thread-safe."""

    def __init__(
        self,
        config: MooncakeConfig,
        local_hostname: str,
        staging: int,
        staging_bytes: int,
        num_lanes: int,
    ) -> None:
        self._config = config
        self._hostname = local_hostname
        self._staging, self._staging_bytes = staging, staging_bytes
        self._num_lanes = num_lanes
        self._tried = threading.Event()
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._lanes: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._why_down = "its client has not started yet"
        # The kernel ends the child when the thread that started it does.
        self._keeper = threading.Thread(target=self._keep, name="mooncake-helper", daemon=True)

    def start(self) -> None:
        """Raises HelperError if the store is not there; `close` is due all the same."""
        self._keeper.start()
        self._tried.wait()
        with self._lock:
            if not self._lanes:
                raise HelperError(self._why_down)

    @property
    def pid(self) -> int | None:
        """Of the child, while it is up."""
        with self._lock:
            return self._process.pid if self._process is not None and self._lanes else None

    def call(self, lane: int, ask: Ask, timeout_s: float) -> list[int]:
        """One answer for each name. Raises HelperError."""
        with self._lock:
            if not self._lanes:
                raise HelperError(self._why_down)
            sock = self._lanes[lane]
        try:
            sock.settimeout(timeout_s)
            sock.send(msgspec.msgpack.encode(ask))
            answer = sock.recv(MAX_MESSAGE_BYTES)
            if not answer:
                raise ConnectionError("its client ended")
            codes = msgspec.msgpack.decode(answer, type=list[int])
        except TimeoutError:
            raise self._fail(sock, f"no answer within {timeout_s:.1f} s") from None
        except (OSError, msgspec.DecodeError) as error:
            raise self._fail(sock, str(error)) from None
        if MASTER_LOST in codes or len(codes) != len(ask.names):
            raise self._fail(sock, "its master does not answer")
        return codes

    def close(self) -> None:
        self._closing.set()
        self._end("it was closed")
        self._failed.set()
        if self._keeper.ident is not None:
            self._keeper.join(START_S)

    def _fail(self, sock: socket.socket, reason: str) -> HelperError:
        """Ends the process, unless another one has taken its place already."""
        text = f"the Mooncake Store at {self._config.master_server_address} is gone: {reason}"
        with self._lock:
            current = sock in self._lanes
        if current:
            self._end(text)
            self._failed.set()
        return HelperError(text)

    def _end(self, why: str) -> None:
        with self._lock:
            lanes, self._lanes = self._lanes, []
            if lanes and not self._closing.is_set():
                _log.warning("%s; what it would give is computed", why)
            self._why_down = why
            if self._process is not None:
                self._process.kill()
        for lane in lanes:
            lane.shutdown(socket.SHUT_RDWR)  # wakes whoever waits

    def _keep(self) -> None:
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
        """Why it did not come up; "" if it did."""
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._num_lanes)
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
                self._lanes = ours
                return ""
        process.kill()
        for sock in ours:
            sock.close()
        return error

    def _spawn(self, lanes: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
        config = self._config
        fds = tuple(lane.fileno() for lane in lanes)
        start = Start(
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
        command = [sys.executable, "-m", mooncake_child.__name__]
        return subprocess.Popen(  # noqa: S603 - ourselves, and fixed arguments
            [*command, msgspec.json.encode(start).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(*fds, self._staging),
        )

    def _await_ready(self, lane: socket.socket) -> str:
        where = f"the Mooncake Store at {self._config.master_server_address}"
        lane.settimeout(START_S)
        try:
            answer = lane.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            return f"{where} did not answer within {START_S:.0f} s; is its mooncake_master running?"
        except OSError as error:
            return f"{where} cannot be used: {error}"
        if not answer:
            return f"{where} cannot be used: its client ended while it connected"
        return msgspec.json.decode(answer, type=Ready).error

    def _reap(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
