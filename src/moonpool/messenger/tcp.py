"""Slices over TCP: the bytes follow their message, from arena to arena with no copy in between."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import Cut
from moonpool.messenger.landing_table import LandingTable
from moonpool.messenger.mover import Mover
from moonpool.messenger.transport import FrameSocket, PeerGoneError
from moonpool.messenger.wire import Codec, Slices, unpack_offers
from moonpool.types import InstanceId

NEAR_S = 0.002
_ROUND_TRIP = struct.Struct("=68xI")  # tcpi_rtt of linux/tcp.h's tcp_info, in microseconds


class TcpConnection:
    """See `transport.Connection`."""

    transport = "tcp"
    takes_unnamed = False

    def __init__(self, frames: FrameSocket, peer: InstanceId, mover: Mover) -> None:
        frames.read_ahead()
        self._mover = mover
        self.peer = peer
        self._frames = frames
        self._codec = Codec()
        self.send = frames.send
        self.hold = frames.hold
        self.flush = frames.flush
        self.receive = frames.receive
        self.fileno = frames.fileno
        self.has_input = frames.has_input
        self.hung_up = frames.hung_up
        self.interrupt = frames.interrupt
        self.close = frames.close

    @property
    def closed(self) -> bool:
        return self._frames.closed

    @property
    def holds(self) -> bool:
        return self._frames.holds

    def offer(self, offer: Slices, arena: Arena, deadline_s: float, cut: Cut | None = None) -> None:
        if cut is not None:
            named = unpack_offers(offer.offers)
            pieces = [p for _, layer, block, _ in named for p in cut.of(arena.slice(block, layer))]
            self._frames.send_frame(self._codec.encode(offer), deadline_s, pieces)
            return
        self._mover.send(self._frames, self._codec.encode(offer), offer.offers, arena, deadline_s)

    def take(self, offers: bytes, table: LandingTable, deadline_s: float) -> int:
        return self._mover.receive(self._frames, offers, table, deadline_s)


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
    """To be called on both ends once they are connected. BBR paces what it sends by a model of a
    bottleneck; within one network that costs up to half of the rate, so where it is the default a
    near peer gets another one. What else an operator has chosen stays."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion_control(sock) != "bbr" or _round_trip_s(sock) >= NEAR_S:
        return
    for name in (b"cubic", b"reno"):  # reno is allowed everywhere
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def congestion_control(sock: socket.socket) -> str:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode("ascii")


def _round_trip_s(sock: socket.socket) -> float:
    """As the kernel saw it when it connected."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    return float(_ROUND_TRIP.unpack(info)[0]) / 1e6
