"""Connections from this instance to its peers: how they are made, and how they are reused.

`Connector` makes the connection for one operation. The transports to a peer, best first: the
connection kept from the operation before, shared memory if the peer runs on this host and uses it,
NIXL if both have it, TCP. If one transport fails, the next is tried within the deadline. A refusal
(AuthError) is final.

`ConnectionPool` runs operations, each in a thread with a connection to one peer. Thread and
connection are kept for the next operation with that peer:

    working -> idle -> working ...
    idle -> ended (no work for IDLE_S, the peer hung up, too many are idle, or `close`)

Connecting and authenticating take ten times as long as the transfer of a small block. An idle
thread polls its connection, so that it notices at once when the peer ends.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.link.auth import AuthError, ClientHandshake, Identity
from moonpool.link.tls import PeerTls
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId
from moonpool_engine.transfer import nixl, shm, tcp
from moonpool_engine.transfer.arena import Arena, PeerArenas
from moonpool_engine.transfer.authentication import authenticate_frames
from moonpool_engine.transfer.connection import Connection
from moonpool_engine.transfer.errors import PeerGoneError, TransportError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.nixl_agent import NixlAgent
from moonpool_engine.transfer.slice_copier import SliceCopier
from moonpool_engine.transfer.tls_frames import connected
from moonpool_engine.transfer.wire import Message

HANDSHAKE_TIMEOUT_S = 5.0
IDLE_S = 30.0
MAX_IDLE_PER_PEER = 4
FALLBACK_S = 10.0
"""How long a connection by a fallback transport is kept before the best one is tried again."""
_OPENING_S = 0.1  # an idle connection has room for one message, because the caller must not block
_LINGER_S = 1e-3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The data that this instance needs to connect to peers. `host_id` is "" if shared memory is
    disabled."""

    secret: bytes
    identity: Identity
    host_id: str
    arena: Arena
    peer_arenas: PeerArenas
    slice_copier: SliceCopier
    nixl_agent: NixlAgent | None = None
    tls: PeerTls | None = None

    def can_use_shm(self, peer: PeerAddress) -> bool:
        """Whether the peer runs on this host and both use shared memory."""
        return bool(self.host_id and self.host_id == peer.host_id and peer.unix_name)

    def can_use_nixl(self, peer: PeerAddress) -> bool:
        return self.nixl_agent is not None and bool(peer.nixl_port)


class Connector:
    """Makes the connection of one operation to a peer. One thread uses a `Connector`."""

    def __init__(
        self,
        peer: PeerAddress,
        own: Credentials,
        kept: Connection | None = None,
        opening_sent: bool = False,
    ) -> None:
        self.connection: Connection | None = kept
        self.opening_sent = opening_sent
        """Whether the operation's first message has been sent on the current connection."""
        self.is_fallback = False
        """Whether the connection is new and does not use the best transport."""
        self._peer = peer
        self._own = own
        self._is_kept = kept is not None
        self._dialers: list[Callable[[float], Connection]] = [self._dial_tcp]
        if own.can_use_nixl(peer):
            self._dialers.insert(0, self._dial_nixl)
        if own.can_use_shm(peer):
            self._dialers.insert(0, self._dial_shm)
        self._num_dialers = len(self._dialers)

    def connect(self, deadline_s: float) -> Connection:
        """Returns the kept connection, or a new one by the next transport that works. Raises
        AuthError, or TransportError once no transport is left."""
        while self.connection is None:
            if not self._dialers:
                raise PeerGoneError(f"every transport to {self._peer.instance_id} was tried")
            try:
                self.connection = self._dialers[0](deadline_s)
                self.is_fallback = len(self._dialers) < self._num_dialers
            except TransportError as error:
                del self._dialers[0]
                if not self._dialers:
                    raise
                _log.info("trying %s by the next transport: %s", self._peer.instance_id, error)
        return self.connection

    def fail(self, answered: bool) -> bool:
        """Closes the connection, which failed. `answered`: whether the peer had started the
        operation. Returns whether `connect` can try again."""
        if self.connection is None:
            return False
        self.connection.close()
        # A kept connection that the peer has closed says nothing about its transport.
        if answered or not self._is_kept:
            del self._dialers[0]
        self._is_kept, self.opening_sent, self.connection = False, False, None
        return bool(self._dialers)

    def _dial_shm(self, deadline_s: float) -> Connection:
        by_s = _leaving_time(deadline_s)
        frames = FrameSocket(shm.connect(self._peer.unix_name, by_s))
        own = self._own

        def exchange(peer: InstanceId) -> Connection:
            return shm.exchange_arenas(
                frames, peer, own.arena, own.peer_arenas, own.slice_copier, by_s
            )

        return self._handshake(frames, by_s, exchange)

    def _dial_nixl(self, deadline_s: float) -> Connection:
        by_s, agent = _leaving_time(deadline_s), self._own.nixl_agent
        assert agent is not None
        frames = FrameSocket(tcp.connect(self._peer.tcp_host, self._peer.nixl_port, by_s))
        return self._handshake(
            frames, by_s, lambda peer: nixl.exchange_metadata(frames, peer, agent, by_s)
        )

    def _dial_tcp(self, deadline_s: float) -> Connection:
        by_s = min(deadline_s, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        sock, tls = tcp.connect(self._peer.tcp_host, self._peer.tcp_port, by_s), self._own.tls
        frames = FrameSocket(sock) if tls is None else connected(tls, sock)
        return self._handshake(
            frames, by_s, lambda peer: tcp.TcpConnection(frames, peer, self._own.slice_copier)
        )

    def _handshake(
        self,
        frames: FrameSocket,
        deadline_s: float,
        make_connection: Callable[[InstanceId], Connection],
    ) -> Connection:
        """Authenticates both ends, then makes the connection. Closes `frames` on failure."""
        own, peer_id = self._own, self._peer.instance_id
        try:
            frames.begin(deadline_s)
            handshake = ClientHandshake(own.secret, own.identity)
            found = authenticate_frames(frames, handshake, deadline_s)
            if found.instance_id != peer_id:
                raise AuthError(f"{found.instance_id!r} answers where {peer_id!r} should be")
            return make_connection(peer_id)
        except BaseException:
            frames.close()
            raise


def _leaving_time(deadline_s: float) -> float:
    """Returns a deadline for one transport that leaves time to try the next."""
    now_s = time.monotonic()
    return min(now_s + HANDSHAKE_TIMEOUT_S, (now_s + deadline_s) / 2)


Completion = Callable[[], None]
Operation = Callable[[Connector], Completion]
"""Runs an operation and returns a callback that reports its end. The callback is called once the
connection is back in the pool, so that it may start the next operation on it."""


class PooledConnection:
    """A connection and the state of its thread. The pool's lock guards which thread owns it."""

    def __init__(self, peer: PeerAddress) -> None:
        self.peer = peer
        self.operation: Operation | None = None
        self.connection: Connection | None = None
        self.opening_lock = threading.Lock()  # a thread holds it while it sends an opening message
        self.opening_sent = False
        self.keep_until_s = float("inf")
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()

    def set_connection(self, connection: Connection | None, is_fallback: bool) -> None:
        """Sets the connection to keep. A connection by a fallback transport is kept for
        FALLBACK_S."""
        if connection is not self.connection:
            self.connection = connection
            self.keep_until_s = time.monotonic() + FALLBACK_S if is_fallback else float("inf")
            self._poll = select.poll()
            self._poll.register(self.wake_fd, select.POLLIN)
            if connection is not None and not connection.closed:
                self._poll.register(connection.fileno(), select.POLLIN)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Waits for a wake-up. Returns whether the connection is useless: no operation came in
        time, the peer closed it, or the peer sent a message outside an operation."""
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        return ready != [self.wake_fd]

    def flush_queued(self, linger: bool) -> None:
        """Sends the ended operation's last message, if it is still queued. With `linger`, first
        waits a moment, because the message may go out with the next operation's opening message."""
        connection = self.connection
        if connection is None or not connection.has_queued:
            return
        if linger:
            ready = [fd for fd, _ in self._poll.poll(_LINGER_S * 1000)]
            # A wake-up without an operation is a late one of the operation before: flush then.
            if ready and (ready != [self.wake_fd] or self.operation is not None):
                return  # `wait_for_work` handles the end of the connection
        with self.opening_lock:
            try:
                if connection.has_queued:
                    connection.flush(time.monotonic() + _OPENING_S)
            except TransportError:
                connection.interrupt()  # all data of the operation that has ended have arrived

    def send_opening(self, message: Message) -> None:
        """Sends the operation's first message from the calling thread, so that the peer starts
        while this connection's thread wakes up. The operation will notice a failure."""
        assert self.connection is not None
        try:
            self.connection.send(message, time.monotonic() + _OPENING_S)
            self.opening_sent = True
        except TransportError:
            self.connection.interrupt()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        os.close(self.wake_fd)


class ConnectionPool:
    """Runs operations on pooled connections. `spawn` starts a new thread. Thread-safe."""

    def __init__(
        self, own: Credentials, spawn: Callable[[str, Completion], object], idle_s: float = IDLE_S
    ) -> None:
        self._own = own
        self._spawn = spawn
        self._idle_s = idle_s
        # guards the fields below, and the right to end an idle connection
        self._lock = threading.Lock()
        self._idle: dict[PeerAddress, list[PooledConnection]] = {}
        self._closing = False

    def run(self, peer: PeerAddress, operation: Operation, opening: Message) -> None:
        """Runs the operation in the thread of an idle connection to the peer, or of a new one, and
        returns at once. The operation's connector shows whether `opening` has been sent."""
        with self._lock:
            idle = self._idle.get(peer)
            pooled = idle.pop() if idle else PooledConnection(peer)
            pooled.operation = operation
            pooled.opening_lock.acquire()
        try:
            if pooled.connection is None:
                self._spawn("transfer", lambda: self._serve(pooled))
            else:
                pooled.send_opening(opening)
                os.eventfd_write(pooled.wake_fd, 1)
        finally:
            pooled.opening_lock.release()

    def only_tcp(self, peer: PeerAddress) -> bool:
        """Whether TCP is the only transport to the peer."""
        return not self._own.can_use_shm(peer) and not self._own.can_use_nixl(peer)

    def close(self) -> None:
        """Ends idle connections at once, and other connections when their operations end."""
        with self._lock:
            self._closing = True
            for connections in self._idle.values():
                for pooled in connections:
                    os.eventfd_write(pooled.wake_fd, 1)

    def _serve(self, pooled: PooledConnection) -> None:
        """Runs one operation after another. This is the body of the connection's thread."""
        try:
            while True:
                operation, pooled.operation = pooled.operation, None
                if operation is not None:
                    with pooled.opening_lock:
                        opening_sent, pooled.opening_sent = pooled.opening_sent, False
                    connector = Connector(pooled.peer, self._own, pooled.connection, opening_sent)
                    complete = operation(connector)
                    pooled.set_connection(connector.connection, connector.is_fallback)
                    kept = self._return_to_pool(pooled)
                    complete()
                    pooled.flush_queued(linger=kept)
                    if not kept:
                        return
                useless = pooled.wait_for_work(self._idle_s)
                if self._remove_idle(pooled, useless):
                    return
        finally:
            pooled.close()

    def _return_to_pool(self, pooled: PooledConnection) -> bool:
        """Makes the connection idle: it may get an operation from now on. Returns False if it is
        not needed any more."""
        connection = pooled.connection
        if connection is None or connection.closed or time.monotonic() > pooled.keep_until_s:
            return False
        with self._lock:
            idle = self._idle.setdefault(pooled.peer, [])
            if self._closing or len(idle) >= MAX_IDLE_PER_PEER:
                return False
            idle.append(pooled)
            return True

    def _remove_idle(self, pooled: PooledConnection, useless: bool) -> bool:
        """Removes a useless connection from the pool. Returns False if it has got an operation, or
        if the wake-up belonged to an operation that has run already: the peer's answer may arrive
        before the wake-up that goes with the request."""
        with self._lock:
            idle = self._idle.get(pooled.peer, [])
            if pooled not in idle or not (useless or self._closing):
                return False
            idle.remove(pooled)
            if not idle:
                del self._idle[pooled.peer]
            return True
