"""Connections that peers make to this instance: accepted, authenticated, and served one operation
after the other by a thread each, until the peer hangs up or has asked for nothing for IDLE_S.

When MAX_CONNECTIONS are open, the one idle longest is closed for a new one (its peer then simply
connects again); where none is idle, the new one is refused.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.messenger import tcp
from moonpool.messenger.auth import AuthError
from moonpool.messenger.peering import HANDSHAKE_TIMEOUT_S, Credentials, admit
from moonpool.messenger.read import Reads
from moonpool.messenger.receive_stream import Receptions
from moonpool.messenger.station import Station
from moonpool.messenger.transport import (
    Connection,
    DeadlineError,
    FrameSocket,
    PeerGoneError,
    ProtocolError,
    TransportError,
)
from moonpool.messenger.wire import Message, OpenStream, ReadBlocks

MAX_CONNECTIONS = 256
IDLE_S = 60.0  # longer than the peer keeps its end, so that it is the peer who hangs up
_BUSY = float("inf")
_log = logging.getLogger(__name__)


class Inbound:
    """`accept` runs in a thread of its own; `spawn` starts the others."""

    def __init__(
        self,
        station: Station,
        own: Credentials,
        reads: Reads,
        receptions: Receptions,
        spawn: Callable[[str, Callable[[], None]], object],
    ) -> None:
        self._station = station
        self._own = own
        self._reads = reads
        self._receptions = receptions
        self._spawn = spawn
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards what follows
        self._idle_since_s: dict[FrameSocket, float] = {}
        self._closing = False
        self._stopped = False

    def wake(self) -> None:
        """There may be an earlier deadline now."""
        with self._lock:
            if not self._stopped:
                os.eventfd_write(self._wake_fd, 1)

    def stop_accepting(self) -> None:
        self._closing = True
        self.wake()

    def interrupt(self) -> None:
        """Breaks every connection off, and takes the descriptor that `wake` uses away."""
        with self._lock:
            for frames in self._idle_since_s:
                frames.interrupt()
            if not self._stopped:
                os.close(self._wake_fd)
                self._stopped = True

    def accept(self, listeners: Sequence[socket.socket]) -> None:
        """Until `stop_accepting`; closes the listeners."""
        selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        selector.register(self._wake_fd, selectors.EVENT_READ)
        while not self._closing:
            deadline_s = self._receptions.next_deadline_s()
            now_s = time.monotonic()
            for key, _ in selector.select(None if deadline_s is None else deadline_s - now_s):
                if isinstance(key.fileobj, socket.socket):
                    self._accept_one(key.fileobj)
                else:
                    os.eventfd_read(self._wake_fd)
            self._receptions.expire(time.monotonic())
        selector.close()
        for listener in listeners:
            listener.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)  # out of descriptors: do not spin
            return
        frames = FrameSocket(sock)
        with self._lock:
            since_s = self._idle_since_s
            full = len(since_s) >= MAX_CONNECTIONS
            if full:
                longest = min(since_s, key=since_s.__getitem__)
                if since_s[longest] < _BUSY:
                    longest.interrupt()
                    del since_s[longest]
                    full = False
            if not full:
                since_s[frames] = _BUSY
        if full:
            frames.close()
            self._station.counters.refused()
            _log.warning("refused a connection: %d are in use", MAX_CONNECTIONS)
        else:
            self._spawn("serve", lambda: self._serve(frames))

    def _serve(self, frames: FrameSocket) -> None:
        """One connection, from handshake to close."""
        try:
            if frames.socket.family != socket.AF_UNIX:
                tcp.prepare(frames.socket)
            connection = admit(frames, self._own)
            try:
                opening = connection.receive(time.monotonic() + HANDSHAKE_TIMEOUT_S)
                while self._perform(connection, opening):
                    try:
                        opening = self._next(connection, frames)
                    except (PeerGoneError, DeadlineError):
                        break  # as it may between two operations
            finally:
                connection.close()
        except (AuthError, TransportError, OSError) as error:
            if not self._closing:
                self._station.counters.refused()
                _log.warning("closed a connection to %s: %s", self._station.instance_id, error)
        finally:
            frames.close()
            with self._lock:
                self._idle_since_s.pop(frames, None)

    def _perform(self, connection: Connection, opening: Message) -> bool:
        if isinstance(opening, OpenStream):
            return self._receptions.serve(connection, opening)
        if isinstance(opening, ReadBlocks):
            return self._reads.serve(connection, opening)
        raise ProtocolError(f"unexpected {type(opening).__name__} at the start of an operation")

    def _next(self, connection: Connection, frames: FrameSocket) -> Message:
        now_s = time.monotonic()
        with self._lock:
            if self._closing or frames not in self._idle_since_s:
                raise PeerGoneError("it had to go")
            self._idle_since_s[frames] = now_s
        opening = connection.receive(now_s + IDLE_S)
        with self._lock:
            if frames not in self._idle_since_s:
                raise PeerGoneError("it had to go")
            self._idle_since_s[frames] = _BUSY
        return opening
