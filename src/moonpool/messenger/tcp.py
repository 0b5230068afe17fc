"""Slices over TCP: the bytes follow their message, from arena to arena with no copy in between."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from moonpool.messenger.arena import Arena
from moonpool.messenger.transport import FrameSocket, PeerGoneError
from moonpool.messenger.wire import Codec, SliceOffer, Slices
from moonpool.types import InstanceId


class TcpConnection:
    """See `transport.Connection`."""

    transport = "tcp"

    def __init__(self, frames: FrameSocket, peer: InstanceId) -> None:
        frames.read_ahead()
        self.peer = peer
        self._frames = frames
        self._codec = Codec()
        self.send = frames.send
        self.hold = frames.hold
        self.flush = frames.flush
        self.receive = frames.receive
        self.fileno = frames.fileno
        self.has_input = frames.has_input
        self.interrupt = frames.interrupt
        self.close = frames.close

    @property
    def closed(self) -> bool:
        return self._frames.closed

    @property
    def holds(self) -> bool:
        return self._frames.holds

    def offer(self, offer: Slices, slices: Sequence[memoryview], deadline_s: float) -> None:
        self._frames.send_frame(self._codec.encode(offer), deadline_s, slices)

    def take(
        self, offers: Sequence[SliceOffer], arena: Arena, places: Sequence[int], deadline_s: float
    ) -> None:
        size = arena.slice_bytes
        targets: list[memoryview] = []
        start = end = places[0]
        for place in places:
            if place != end:  # neighbours are received as one
                targets.append(arena.buffer[start:end])
                start = place
            end = place + size
        targets.append(arena.buffer[start:end])
        self._frames.receive_into(targets, deadline_s)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError; port 0 lets the system choose."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def connect(host: str, port: int, deadline_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((host, port), max(0.001, deadline_s - time.monotonic()))
    except OSError as error:
        raise PeerGoneError(f"cannot connect to {host}:{port}: {error}") from error
    prepare(sock)
    return sock


def prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
