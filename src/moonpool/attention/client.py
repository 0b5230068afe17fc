"""A model worker's two connections to an attention worker: for orders and events, and for steps."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from moonpool.attention.control import (
    ANSWER,
    ENCODER,
    MAX_FRAME_BYTES,
    SERVICE,
    TOLD,
    Attach,
    Attached,
    Order,
    Refused,
    Steps,
    Told,
)
from moonpool.attention.partition import HeadRange
from moonpool.attention.port import Port, PortError, SocketPort, offer_rings, rings_available
from moonpool.engine.ops import HeadShape
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger import shm, tcp
from moonpool.messenger.auth import AuthError, ClientHandshake, Identity, authenticate_frames
from moonpool.messenger.transport import DeadlineError, FrameSocket, TransportError
from moonpool.types import InstanceId, Struct

DIAL_S = 5.0
ATTACH_S = 60.0  # the worker may have an arena to make
PATIENCE_S = 30.0  # with a worker that is at a step
LONG_SPIN_S = 2e-3  # what the other side of a layer takes
SHORT_SPIN_S = 5e-6
SEND_S = 5.0
LISTEN_S = 86_400.0  # at a time: there may be nothing to hear for long


class AttentionError(Exception):
    """The attention worker cannot be reached or does not take us; one line."""


class Wanted(Struct, frozen=True):
    """What a model worker needs of an attention worker."""

    owner: InstanceId
    layout: BlockLayout
    heads: int
    head_dim: int
    scale: float
    num_blocks: int
    threads: int
    ring_bytes: int
    spin_s: float = SHORT_SPIN_S
    kv_heads: HeadRange | None = None  # of all blocks; None: all heads

    def attach(self, token: str) -> Attach:
        """`token` opens the connection for the steps."""
        return Attach(
            owner=self.owner,
            layout=self.layout,
            num_heads=self.heads,
            kv_heads=self.kv_heads,
            scale=self.scale,
            num_blocks=self.num_blocks,
            threads=self.threads,
            token=token,
            ring_bytes=self.ring_bytes,
        )


def spin_s(num_workers: int, threads: int, cores: int) -> float:
    """How long model worker and attention workers of one host look for each other's messages
    before they sleep: waking takes longer than most waits. But who looks keeps a core, so there
    must be one for each."""
    return LONG_SPIN_S if (1 + num_workers) * threads <= cores else SHORT_SPIN_S


def ring_bytes(heads: HeadShape, element_bytes: int, max_rows: int) -> int:
    """Room for two steps' rows of a layer, so that nobody waits for the other to read."""
    row = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim * element_bytes
    return -(-max(2 * row * max_rows, 1 << 20) // 4096) * 4096


class AttentionClient:
    """Made by `connect`. `orders` may come from any thread."""

    def __init__(self, frames: FrameSocket, port: Port, attached: Attached) -> None:
        self.port = port
        self.attached = attached
        self._frames = frames
        self._sending = threading.Lock()

    def order(self, order: Order) -> None:
        """Lost with the connection: the listener hears of that."""
        with self._sending:
            try:
                self._frames.send_frame(ENCODER.encode(order), time.monotonic() + SEND_S)
            except TransportError:
                self._frames.interrupt()

    def listen(self, on_told: Callable[[Told], None], on_lost: Callable[[str], None]) -> None:
        """Starts the thread that hears it; `on_lost` ends it."""

        def run() -> None:
            why = "it talks nonsense"
            try:
                while True:
                    on_told(TOLD.decode(receive_any(self._frames)))
            except (TransportError, msgspec.DecodeError) as error:
                why = str(error)
            finally:
                self.close()
                on_lost(why)

        threading.Thread(target=run, name="attention-listener", daemon=True).start()

    def close(self) -> None:
        self._frames.interrupt()
        self.port.close()


def connect(
    address: PeerAddress, me: InstanceId, secret: bytes, wanted: Wanted, use_shm: bool
) -> AttentionClient:
    """Raises AttentionError."""
    token = secrets.token_hex(16)
    try:
        frames, _ = _dial(address, me, secret, use_shm)
        try:
            attached = _attach(frames, wanted, token)
            return AttentionClient(
                frames, _open_steps(address, me, secret, wanted, token, use_shm), attached
            )
        except BaseException:
            frames.close()
            raise
    except (TransportError, AuthError, PortError, OSError, msgspec.DecodeError) as error:
        raise AttentionError(f"{address.instance_id}: {error}") from error


def receive_any(frames: FrameSocket) -> bytes:
    """The next frame, whenever it comes."""
    while True:
        with contextlib.suppress(DeadlineError):
            return frames.receive_frame(MAX_FRAME_BYTES, time.monotonic() + LISTEN_S)


def _attach(frames: FrameSocket, wanted: Wanted, token: str) -> Attached:
    by_s = time.monotonic() + ATTACH_S
    frames.send_frame(ENCODER.encode(wanted.attach(token)), by_s)
    answer: Attached | Refused = ANSWER.decode(frames.receive_frame(MAX_FRAME_BYTES, by_s))
    if isinstance(answer, Refused):
        raise PortError(answer.reason)
    return answer


def _open_steps(
    address: PeerAddress, me: InstanceId, secret: bytes, wanted: Wanted, token: str, use_shm: bool
) -> Port:
    frames, is_local = _dial(address, me, secret, use_shm)
    rings = is_local and rings_available()
    opening = ENCODER.encode(Steps(token=token, rings=rings, spin_s=wanted.spin_s))
    frames.send_frame(opening, time.monotonic() + DIAL_S)
    sock = frames.socket
    if rings:
        return offer_rings(sock, wanted.ring_bytes, PATIENCE_S, wanted.spin_s)
    return SocketPort(sock, PATIENCE_S, absorbs=True)


def _dial(
    address: PeerAddress, me: InstanceId, secret: bytes, use_shm: bool
) -> tuple[FrameSocket, bool]:
    """An authenticated connection, and whether it stays on this host."""
    by_s = time.monotonic() + DIAL_S
    is_local = use_shm and bool(address.unix_name) and shm.host_id() == address.host_id
    sock: socket.socket
    if is_local:
        sock = shm.connect(address.unix_name, by_s)
    else:
        sock = tcp.connect(address.tcp_host, address.tcp_port, by_s)
    frames = FrameSocket(sock)
    try:
        identity = Identity(instance_id=me, service=SERVICE, fingerprint=b"")
        found = authenticate_frames(frames, ClientHandshake(secret, identity), by_s)
        if found.instance_id != address.instance_id:
            raise AuthError(f"{found.instance_id!r} answers where it should be")
    except BaseException:
        frames.close()
        raise
    return frames, is_local
