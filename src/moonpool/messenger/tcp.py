"""Slices over TCP: the bytes follow their message, from arena to arena with no copy in between."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from moonpool.messenger.transport import FrameSocket, PeerGoneError
from moonpool.messenger.wire import Codec, SliceOffer, Slices
from moonpool.types import InstanceId


class TcpConnection:
    """See `transport.Connection`."""

    transport = "tcp"

    def __init__(self, frames: FrameSocket, peer: InstanceId) -> None:
        self.peer = peer
        self._frames = frames
        self._codec = Codec()
        self.send = frames.send
        self.receive = frames.receive
        self.fileno = frames.fileno
        self.interrupt = frames.interrupt
        self.close = frames.close

    def offer(
        self, offers: list[SliceOffer], slices: Sequence[memoryview], deadline_s: float
    ) -> None:
        self._frames.send_frame(self._codec.encode(Slices(offers=offers)), deadline_s, slices)

    def take(
        self, offers: Sequence[SliceOffer], targets: list[memoryview], deadline_s: float
    ) -> None:
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
