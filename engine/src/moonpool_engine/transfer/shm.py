"""Shared-memory transport within a host: the reader copies slices from the sender's arena.

Over the unix socket, only positions and checksums are sent. After the handshake each side passes a
read-only descriptor of its arena's memory file to the other, which maps it (`arena`). The sender
keeps a slice unchanged until the reader has reported that it is done.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from moonpool.types import InstanceId
from moonpool_engine.transfer.arena import Arena, ArenaError, PeerArena, PeerArenas
from moonpool_engine.transfer.connection import FrameConnection
from moonpool_engine.transfer.errors import PeerGoneError, ProtocolError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_copier import SliceCopier
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import Slices


class ShmConnection(FrameConnection):
    """See `connection.Connection`. Uses the peer's arena until it is closed."""

    transport = "shm"
    defers_checksums = True

    def __init__(
        self,
        frames: FrameSocket,
        peer: InstanceId,
        peer_arena: PeerArena,
        release: Callable[[], None],
        slice_copier: SliceCopier,
    ) -> None:
        super().__init__(frames, peer)
        self._slice_copier = slice_copier
        self._peer_arena: PeerArena | None = peer_arena
        self._release = release

    def send_slices(
        self, offer: Slices, arena: Arena, deadline_s: float, target_view: ShardView | None = None
    ) -> None:
        self._frames.send(offer, deadline_s)

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int:
        """Copies from the peer's arena, as `Connection.receive_slices`. Raises PeerGoneError if
        this side has closed the connection, and ProtocolError for slices that are not expected."""
        peer_arena = self._peer_arena
        if peer_arena is None:
            raise PeerGoneError("the connection was closed")
        return self._slice_copier.copy(peer_arena, offers, receiver)

    def close(self) -> None:
        super().close()
        if self._peer_arena is not None:
            self._peer_arena = None
            self._release()


def exchange_arenas(
    frames: FrameSocket,
    peer: InstanceId,
    arena: Arena,
    peer_arenas: PeerArenas,
    slice_copier: SliceCopier,
    deadline_s: float,
) -> ShmConnection:
    """Sends our arena's descriptor to the peer and maps the peer's. Raises TransportError."""
    sock, timeout_text = frames.socket, ""
    frames.set_timeout(deadline_s)
    try:
        socket.send_fds(sock, [b"a"], [arena.peer_fd])  # a single byte always fits
    except OSError as error:
        raise PeerGoneError(f"the connection broke: {error}") from error
    while True:
        frames.set_timeout(deadline_s, timeout_text)
        try:
            data, fds, flags, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:
            timeout_text = "the peer sent no arena before the deadline"
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error
    if data != b"a" or len(fds) != 1 or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        if not data:
            raise PeerGoneError("the peer closed the connection")
        raise ProtocolError("the peer sent no arena")
    try:
        peer_arena, name = peer_arenas.adopt(fds[0], arena.layout)
    except ArenaError as error:
        raise ProtocolError(str(error)) from error
    return ShmConnection(frames, peer, peer_arena, lambda: peer_arenas.release(name), slice_copier)


def host_id() -> str:
    """Returns an id that is equal for processes that share abstract unix sockets: it names the boot
    and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown-{secrets.token_hex(8)}"  # a unique name, so that shared memory is not used


def listen(name: str) -> socket.socket:
    """Returns a listening unix socket. `name` is in the abstract namespace: it disappears with the
    socket and leaves no file. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def connect(name: str, deadline_s: float) -> socket.socket:
    """Returns a connected unix socket. Raises PeerGoneError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.connect("\0" + name)
    except OSError as error:
        with contextlib.suppress(OSError):
            sock.close()
        raise PeerGoneError(f"cannot connect to the unix socket @{name}: {error}") from error
    return sock
