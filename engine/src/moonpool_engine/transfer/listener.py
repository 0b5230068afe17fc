"""Accepts and authenticates connections from peers, and serves one operation after the other on
each, in a thread per connection, until the peer hangs up or starts no operation for IDLE_S.

When MAX_CONNECTIONS are open, a new one replaces the connection idle longest, whose peer then
connects again. If no connection is idle, the new one is refused. When MAX_HALF_OPEN connections
have not proved the secret yet, a new connection ends the oldest of these.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.link.auth import AuthError, ServerHandshake
from moonpool.log_limit import limited_logger
from moonpool_engine.transfer import nixl, shm, tcp
from moonpool_engine.transfer.authentication import authenticate_frames
from moonpool_engine.transfer.connection import Connection
from moonpool_engine.transfer.connection_pool import HANDSHAKE_TIMEOUT_S, Credentials
from moonpool_engine.transfer.context import TransferContext
from moonpool_engine.transfer.errors import (
    DeadlineError,
    PeerGoneError,
    ProtocolError,
    TransportError,
)
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.receive_stream import IncomingStreams
from moonpool_engine.transfer.serve_read import IncomingReads
from moonpool_engine.transfer.tls_frames import accepted
from moonpool_engine.transfer.wire import Message, OpenStream, ReadBlocks

MAX_CONNECTIONS = 256
MAX_HALF_OPEN = 64
IDLE_S = 60.0  # longer than peers keep idle connections, so that the peer closes first
_BUSY = float("inf")
_log = limited_logger(__name__)


class PeerListener:
    """`accept` runs in a separate thread; `spawn` starts one thread per connection."""

    def __init__(
        self,
        context: TransferContext,
        own: Credentials,
        reads: IncomingReads,
        streams: IncomingStreams,
        spawn: Callable[[str, Callable[[], None]], object],
    ) -> None:
        self._context = context
        self._own = own
        self._reads = reads
        self._streams = streams
        self._spawn = spawn
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the fields below
        self._idle_since_s: dict[FrameSocket, float] = {}
        self._half_open: dict[FrameSocket, None] = {}  # a subset of `_idle_since_s`, oldest first
        self._closing = False
        self._stopped = False

    def wake(self) -> None:
        """Wakes the accepting thread: the next deadline may be earlier."""
        with self._lock:
            if not self._stopped:
                os.eventfd_write(self._wake_fd, 1)

    def stop_accepting(self) -> None:
        """Ends `accept`."""
        self._closing = True
        self.wake()

    def interrupt(self) -> None:
        """Interrupts every connection and closes the wake descriptor."""
        with self._lock:
            for frames in self._idle_since_s:
                frames.interrupt()
            if not self._stopped:
                os.close(self._wake_fd)
                self._stopped = True

    def accept(self, listeners: Sequence[socket.socket]) -> None:
        """Accepts connections until `stop_accepting`, then closes the listeners."""
        selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        selector.register(self._wake_fd, selectors.EVENT_READ)
        while not self._closing:
            deadline_s = self._streams.next_deadline_s()
            now_s = time.monotonic()
            for key, _ in selector.select(None if deadline_s is None else deadline_s - now_s):
                if isinstance(key.fileobj, socket.socket):
                    self._accept_one(key.fileobj)
                else:
                    os.eventfd_read(self._wake_fd)
            self._streams.expire(time.monotonic())
        selector.close()
        for listener in listeners:
            listener.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)  # there are no free descriptors, so this must not spin
            return
        tls = self._own.tls
        is_local = sock.family == socket.AF_UNIX
        try:
            frames = FrameSocket(sock) if tls is None or is_local else accepted(tls, sock)
        except PeerGoneError:
            self._context.counters.refused()
            return  # the peer has left already
        with self._lock:
            since_s = self._idle_since_s
            if len(self._half_open) >= MAX_HALF_OPEN:
                oldest = next(iter(self._half_open))
                oldest.interrupt()
                self._half_open.pop(oldest)
                since_s.pop(oldest, None)
            full = len(since_s) >= MAX_CONNECTIONS
            if full:
                longest = min(since_s, key=since_s.__getitem__)
                if since_s[longest] < _BUSY:
                    longest.interrupt()
                    del since_s[longest]
                    full = False
            if not full:
                since_s[frames] = _BUSY
                self._half_open[frames] = None
        if full:
            frames.close()
            self._context.counters.refused()
            _log.warning("refused a connection: %d are in use", MAX_CONNECTIONS)
        else:
            self._spawn("serve", lambda: self._serve(frames))

    def _serve(self, frames: FrameSocket) -> None:
        """Serves one connection from handshake to close."""
        try:
            if frames.socket.family != socket.AF_UNIX:
                tcp.prepare(frames.socket)
            connection = accept_handshake(frames, self._own)
            with self._lock:
                self._half_open.pop(frames, None)
            try:
                opening = connection.receive(time.monotonic() + HANDSHAKE_TIMEOUT_S)
                while self._perform(connection, opening):
                    try:
                        opening = self._next(connection, frames)
                    except (PeerGoneError, DeadlineError):
                        break  # a peer may close between two operations
            finally:
                connection.close()
        except (AuthError, TransportError, OSError) as error:
            if not self._closing:
                self._context.counters.refused()
                _log.warning("closed a connection to %s: %s", self._context.instance_id, error)
        finally:
            frames.close()
            with self._lock:
                self._idle_since_s.pop(frames, None)
                self._half_open.pop(frames, None)

    def _perform(self, connection: Connection, opening: Message) -> bool:
        if isinstance(opening, OpenStream):
            return self._streams.serve(connection, opening)
        if isinstance(opening, ReadBlocks):
            return self._reads.serve(connection, opening)
        raise ProtocolError(f"unexpected {type(opening).__name__} at the start of an operation")

    def _next(self, connection: Connection, frames: FrameSocket) -> Message:
        now_s = time.monotonic()
        with self._lock:
            if self._closing or frames not in self._idle_since_s:
                raise PeerGoneError("it was closed to make room for another")
            self._idle_since_s[frames] = now_s
        opening = connection.receive(now_s + IDLE_S)
        with self._lock:
            if frames not in self._idle_since_s:
                raise PeerGoneError("it was closed to make room for another")
            self._idle_since_s[frames] = _BUSY
        return opening


def accept_handshake(frames: FrameSocket, own: Credentials) -> Connection:
    """Authenticates an accepted connection. Raises AuthError or TransportError; does not close
    `frames`."""
    by_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    frames.begin(by_s)
    found = authenticate_frames(frames, ServerHandshake(own.secret, own.identity), by_s)
    if frames.socket.family == socket.AF_UNIX:
        return shm.exchange_arenas(
            frames, found.instance_id, own.arena, own.peer_arenas, own.slice_copier, by_s
        )
    agent = own.nixl_agent
    if agent is not None and frames.socket.getsockname()[1] == agent.port:
        return nixl.exchange_metadata(frames, found.instance_id, agent, by_s)
    return tcp.TcpConnection(frames, found.instance_id, own.slice_copier)
