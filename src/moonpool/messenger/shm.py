"""Slices within a host: only place and checksum travel; the reader copies from the sender's arena.

After the handshake both sides hand over their arena's memfd (read-only by its seals) over the unix
socket, and map what they got (`peer_arena`). The sender keeps a slice unchanged until the reader
has said that it is done.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from moonpool.messenger.arena import Arena, ArenaError
from moonpool.messenger.cut import Cut
from moonpool.messenger.landing_table import LandingTable
from moonpool.messenger.mover import Mover
from moonpool.messenger.peer_arena import PeerArena, PeerArenas
from moonpool.messenger.transport import (
    FrameSocket,
    PeerGoneError,
    ProtocolError,
)
from moonpool.messenger.wire import Slices
from moonpool.types import InstanceId


class ShmConnection:
    """See `transport.Connection`. A user of the peer's arena until it is closed."""

    transport = "shm"
    takes_unnamed = True

    def __init__(
        self,
        frames: FrameSocket,
        peer: InstanceId,
        peer_arena: PeerArena,
        release: Callable[[], None],
        mover: Mover,
    ) -> None:
        frames.read_ahead()
        self._mover = mover
        self.peer = peer
        self._frames = frames
        self._peer_arena: PeerArena | None = peer_arena
        self._release = release
        self.send = frames.send
        self.hold = frames.hold
        self.flush = frames.flush
        self.receive = frames.receive
        self.fileno = frames.fileno
        self.has_input = frames.has_input
        self.hung_up = frames.hung_up
        self.interrupt = frames.interrupt

    @property
    def closed(self) -> bool:
        return self._frames.closed

    @property
    def holds(self) -> bool:
        return self._frames.holds

    def offer(self, offer: Slices, arena: Arena, deadline_s: float, cut: Cut | None = None) -> None:
        self._frames.send(offer, deadline_s)

    def take(self, offers: bytes, table: LandingTable, deadline_s: float) -> int:
        peer_arena = self._peer_arena
        if peer_arena is None:
            raise PeerGoneError("the connection was closed")
        return self._mover.copy(peer_arena, offers, table)

    def close(self) -> None:
        self._frames.close()
        if self._peer_arena is not None:
            self._peer_arena = None
            self._release()


def swap_arenas(
    frames: FrameSocket,
    peer: InstanceId,
    arena: Arena,
    peer_arenas: PeerArenas,
    mover: Mover,
    deadline_s: float,
) -> ShmConnection:
    """Hands our arena's descriptor to the peer and takes its own."""
    sock, silent = frames.socket, ""
    frames.arm(deadline_s)
    try:
        socket.send_fds(sock, [b"a"], [arena.fd])  # a byte: there is always room
    except OSError as error:
        raise PeerGoneError(f"the connection broke: {error}") from error
    while True:
        frames.arm(deadline_s, silent)
        try:
            data, fds, flags, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:
            silent = "the peer handed over no arena until the deadline"
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error
    if data != b"a" or len(fds) != 1 or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        if not data:
            raise PeerGoneError("the peer closed the connection")
        raise ProtocolError("the peer handed over no arena")
    try:
        peer_arena, name = peer_arenas.adopt(fds[0], arena.layout)
    except ArenaError as error:
        raise ProtocolError(str(error)) from error
    return ShmConnection(frames, peer, peer_arena, lambda: peer_arenas.release(name), mover)


def host_id() -> str:
    """Equal for processes that share abstract unix sockets: boot and network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown-{secrets.token_hex(8)}"  # equal to nobody's: shared memory is not used


def listen(name: str) -> socket.socket:
    """`name` is abstract: it ends with the socket, there is no file. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def connect(name: str, deadline_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.connect("\0" + name)
    except OSError as error:
        with contextlib.suppress(OSError):
            sock.close()
        raise PeerGoneError(f"cannot connect to the unix socket @{name}: {error}") from error
    return sock
