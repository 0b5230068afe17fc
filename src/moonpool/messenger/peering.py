"""Makes authenticated connections: a `Route` to a peer, `admit` for one that came.

The ways to a peer, best first: the connection kept from the operation before, shared memory where
the peer runs on this host and takes part, NIXL where both have it, TCP. A way that fails gives way
to the next, within the deadline; a refusal (AuthError) is final.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger import nixl, shm, tcp
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import (
    AuthError,
    ClientHandshake,
    Identity,
    ServerHandshake,
    authenticate_frames,
)
from moonpool.messenger.courier import Courier
from moonpool.messenger.mover import Mover
from moonpool.messenger.peer_arena import PeerArenas
from moonpool.messenger.transport import Connection, FrameSocket, PeerGoneError, TransportError
from moonpool.types import InstanceId

HANDSHAKE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of this instance. `host_id` is "" where shared memory must not be used."""

    secret: bytes
    me: Identity
    host_id: str
    arena: Arena
    peer_arenas: PeerArenas
    mover: Mover
    courier: Courier | None = None


def by_memory(own: Credentials, peer: PeerAddress) -> bool:
    """It runs on this host, and both take part."""
    return bool(own.host_id and own.host_id == peer.host_id and peer.unix_name)


def by_nixl(own: Credentials, peer: PeerAddress) -> bool:
    return own.courier is not None and bool(peer.nixl_port)


class Route:
    """The way of one operation to a peer. Used by one thread. `opened` tells whether the first
    message of the operation has been sent on the present connection."""

    def __init__(
        self,
        peer: PeerAddress,
        own: Credentials,
        kept: Connection | None = None,
        opened: bool = False,
    ) -> None:
        self.connection: Connection | None = kept
        self.opened = opened
        self.is_detour = False  # the connection is new, and not by the best way
        self._peer = peer
        self._own = own
        self._is_kept = kept is not None
        self._ways: list[Callable[[float], Connection]] = [self._dial_tcp]
        if by_nixl(own, peer):
            self._ways.insert(0, self._dial_nixl)
        if by_memory(own, peer):
            self._ways.insert(0, self._dial_shm)

        self._num_ways = len(self._ways)

    def connect(self, deadline_s: float) -> Connection:
        """The connection kept, or a new one by the next way that works. Raises AuthError or
        TransportError once no way is left."""
        while self.connection is None:
            if not self._ways:
                raise PeerGoneError(f"every way to {self._peer.instance_id} was tried")
            dial = self._ways[0]
            try:
                self.connection = dial(deadline_s)
                self.is_detour = len(self._ways) < self._num_ways
            except TransportError as error:
                del self._ways[0]
                if not self._ways:
                    raise
                _log.info("trying %s another way: %s", self._peer.instance_id, error)
        return self.connection

    def fail(self, answered: bool) -> bool:
        """Closes the connection, which failed; `answered` tells whether the peer had taken the
        operation up. True if there is another way to try."""
        if self.connection is None:
            return False
        self.connection.close()
        if answered or not self._is_kept:
            del self._ways[0]  # a connection that was kept came by the first way
        self._is_kept, self.opened, self.connection = False, False, None
        return bool(self._ways)

    def _dial_shm(self, deadline_s: float) -> Connection:
        by_s = _leaving_time(deadline_s)
        frames = FrameSocket(shm.connect(self._peer.unix_name, by_s))
        own = self._own
        return self._greet(
            frames,
            by_s,
            lambda peer: shm.swap_arenas(frames, peer, own.arena, own.peer_arenas, own.mover, by_s),
        )

    def _dial_nixl(self, deadline_s: float) -> Connection:
        by_s, courier = _leaving_time(deadline_s), self._own.courier
        assert courier is not None
        frames = FrameSocket(tcp.connect(self._peer.tcp_host, self._peer.nixl_port, by_s))
        return self._greet(frames, by_s, lambda peer: nixl.swap_cards(frames, peer, courier, by_s))

    def _dial_tcp(self, deadline_s: float) -> Connection:
        by_s = min(deadline_s, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        frames = FrameSocket(tcp.connect(self._peer.tcp_host, self._peer.tcp_port, by_s))
        return self._greet(
            frames, by_s, lambda peer: tcp.TcpConnection(frames, peer, self._own.mover)
        )

    def _greet(
        self,
        frames: FrameSocket,
        deadline_s: float,
        go_on: Callable[[InstanceId], Connection],
    ) -> Connection:
        """What `go_on` makes of it once both ends have proven themselves."""
        own, peer_id = self._own, self._peer.instance_id
        try:
            found = authenticate_frames(frames, ClientHandshake(own.secret, own.me), deadline_s)
            if found.instance_id != peer_id:
                raise AuthError(f"{found.instance_id!r} answers where {peer_id!r} should be")
            return go_on(peer_id)
        except BaseException:
            frames.close()
            raise


def _leaving_time(deadline_s: float) -> float:
    """By when a way must work, so that there is time left for the next one."""
    now_s = time.monotonic()
    return min(now_s + HANDSHAKE_TIMEOUT_S, (now_s + deadline_s) / 2)


def admit(frames: FrameSocket, own: Credentials) -> Connection:
    """The other end of `Route`. Raises AuthError or TransportError, and leaves `frames` open."""
    by_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    found = authenticate_frames(frames, ServerHandshake(own.secret, own.me), by_s)
    if frames.socket.family == socket.AF_UNIX:
        return shm.swap_arenas(
            frames, found.instance_id, own.arena, own.peer_arenas, own.mover, by_s
        )
    if own.courier is not None and frames.socket.getsockname()[1] == own.courier.port:
        return nixl.swap_cards(frames, found.instance_id, own.courier, by_s)
    return tcp.TcpConnection(frames, found.instance_id, own.mover)
