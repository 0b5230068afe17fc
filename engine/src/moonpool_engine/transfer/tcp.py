"""TCP transport: the bytes of slices follow their message, from arena to arena without a copy."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from moonpool.types import InstanceId
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.connection import FrameConnection
from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_copier import PlainSliceCopier, SliceCopier
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import Codec, Slices, unpack_offers

NEAR_S = 0.002
_ROUND_TRIP = struct.Struct("=68xI")  # field tcpi_rtt of linux/tcp.h's tcp_info, in microseconds


class TcpConnection(FrameConnection):
    """See `connection.Connection`. Over TLS its `transport` is "tls"."""

    transport = "tcp"
    defers_checksums = False

    def __init__(self, frames: FrameSocket, peer: InstanceId, slice_copier: SliceCopier) -> None:
        super().__init__(frames, peer)
        self._slice_copier = slice_copier
        if frames.is_encrypted:
            self.transport = "tls"
            # the native kernels write to the descriptor themselves
            self._slice_copier = PlainSliceCopier()
        self._codec = Codec()

    def send_slices(
        self, offer: Slices, arena: Arena, deadline_s: float, target_view: ShardView | None = None
    ) -> None:
        if target_view is not None:
            slices = [
                arena.slice(block, layer) for _, layer, block, _ in unpack_offers(offer.offers)
            ]
            pieces = [piece for whole in slices for piece in target_view.of(whole)]
            self._frames.send_frame(self._codec.encode(offer), deadline_s, pieces)
            return
        self._slice_copier.send(
            self._frames, self._codec.encode(offer), offer.offers, arena, deadline_s
        )

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int:
        return self._slice_copier.receive(self._frames, offers, receiver, deadline_s)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 lets the system choose. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def connect(host: str, port: int, deadline_s: float) -> socket.socket:
    """Returns a connected socket. Raises PeerGoneError."""
    try:
        sock = socket.create_connection((host, port), max(0.001, deadline_s - time.monotonic()))
    except OSError as error:
        raise PeerGoneError(f"cannot connect to {host}:{port}: {error}") from error
    prepare(sock)
    return sock


def prepare(sock: socket.socket) -> None:
    """Sets the options of a connected socket. Call it on both ends.

    BBR paces sending by a model of a bottleneck, which costs up to half of the rate within one
    network. So a connection to a near peer gets another congestion control if BBR is the default.
    Any other choice of the operator stays."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion_control(sock) != "bbr" or _round_trip_s(sock) >= NEAR_S:
        return
    for name in (b"cubic", b"reno"):  # the kernel always allows reno
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def congestion_control(sock: socket.socket) -> str:
    """Returns the name of the socket's congestion control."""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode("ascii")


def _round_trip_s(sock: socket.socket) -> float:
    """Returns the round trip that the kernel measured when it connected."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    return float(_ROUND_TRIP.unpack(info)[0]) / 1e6
