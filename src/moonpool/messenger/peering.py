"""Makes authenticated connections: `dial` to a peer, `admit` for one that came.

`dial` chooses the transport: shared memory where the peer runs on this host and takes part, else
TCP; also TCP where shared memory was tried and failed. A refusal (AuthError) is final.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger import shm, tcp
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import (
    AuthError,
    ClientHandshake,
    Identity,
    ServerHandshake,
    authenticate_frames,
)
from moonpool.messenger.transport import Connection, FrameSocket, TransportError

HANDSHAKE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """`host_id` is "" where shared memory must not be used."""

    secret: bytes
    me: Identity
    host_id: str


def dial(peer: PeerAddress, own: Credentials, arena: Arena, deadline_s: float) -> Connection:
    """Connects and authenticates. Raises AuthError or TransportError."""
    if own.host_id and own.host_id == peer.host_id and peer.unix_name:
        try:
            return _dial_shm(peer, own, arena, _soon(deadline_s))
        except TransportError as error:
            _log.info("shared memory with %s failed, trying tcp: %s", peer.instance_id, error)
    tcp_deadline_s = _soon(deadline_s)
    frames = FrameSocket(tcp.connect(peer.tcp_host, peer.tcp_port, tcp_deadline_s))
    try:
        _greet(frames, peer, own, tcp_deadline_s)
        return tcp.TcpConnection(frames, peer.instance_id)
    except BaseException:
        frames.close()
        raise


def _dial_shm(peer: PeerAddress, own: Credentials, arena: Arena, deadline_s: float) -> Connection:
    frames = FrameSocket(shm.connect(peer.unix_name, deadline_s))
    try:
        _greet(frames, peer, own, deadline_s)
        return shm.swap_arenas(frames, peer.instance_id, arena, deadline_s)
    except BaseException:
        frames.close()
        raise


def _greet(frames: FrameSocket, peer: PeerAddress, own: Credentials, deadline_s: float) -> None:
    found = authenticate_frames(frames, ClientHandshake(own.secret, own.me), deadline_s)
    if found.instance_id != peer.instance_id:
        raise AuthError(f"{found.instance_id!r} answers where {peer.instance_id!r} should be")


def admit(frames: FrameSocket, own: Credentials, arena: Arena) -> Connection:
    """The other end of `dial`. Raises AuthError or TransportError, and leaves `frames` open."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    found = authenticate_frames(frames, ServerHandshake(own.secret, own.me), deadline_s)
    if frames.socket.family == socket.AF_UNIX:
        return shm.swap_arenas(frames, found.instance_id, arena, deadline_s)
    return tcp.TcpConnection(frames, found.instance_id)


def _soon(deadline_s: float) -> float:
    return min(deadline_s, time.monotonic() + HANDSHAKE_TIMEOUT_S)
