"""A model worker's side of its attention workers: connections to remote ones, and the local one.

`AttentionClient` has two connections to an attention worker: one for commands and events, one for
steps. `LocalAttentionWorker` has the same interface for memory in the instance's own process; its
steps need no messages.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moonpool.link.auth import AuthError, ClientHandshake, Identity
from moonpool.link.tls import PeerTls
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import MALFORMED, InstanceId, Struct
from moonpool_engine.attention_offload.channel import (
    AttentionChannel,
    AttentionChannelError,
    SocketChannel,
    offer_rings,
    rings_available,
)
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.tls_channel import TlsChannel
from moonpool_engine.attention_offload.wire import (
    ATTACH_REPLY,
    ENCODER,
    EVENT,
    MAX_FRAME_BYTES,
    SERVICE,
    Attach,
    Attached,
    AttentionCommand,
    AttentionEvent,
    AttentionRefused,
    KvHeadRange,
    LayerRule,
    OpenSteps,
    ReceivedBytes,
)
from moonpool_engine.attention_offload.worker_state import AttachError, AttentionWorkerState
from moonpool_engine.engine.ops import HeadShape
from moonpool_engine.transfer import shm, tcp
from moonpool_engine.transfer.arena import ArenaError
from moonpool_engine.transfer.authentication import authenticate_frames
from moonpool_engine.transfer.errors import DeadlineError, TransportError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.tls_frames import TlsFrameSocket, connected

DIAL_S = 5.0
ATTACH_S = 60.0  # the worker may have to make an arena first
STEP_TIMEOUT_S = 30.0  # longest time without progress of a worker within a step
LONG_SPIN_S = 2e-3  # about the time of one layer at the other side
SHORT_SPIN_S = 5e-6
SEND_S = 5.0
LISTEN_S = 86_400.0  # time limit of one wait for a frame, because none may come for long


class AttentionError(Exception):
    """The attention worker cannot be reached or refuses this instance; one line."""


class AttachOptions(Struct, frozen=True):
    """The settings with which a model worker attaches to an attention worker."""

    owner: InstanceId
    layout: BlockLayout
    heads: HeadShape
    scale: float
    rules: tuple[LayerRule, ...]  # rules of each layer; () if all layers attend plainly
    num_blocks: int
    threads: int
    ring_bytes: int
    spin_s: float = SHORT_SPIN_S
    # the KV heads that it holds of all blocks; None means all heads
    kv_heads: KvHeadRange | None = None

    def attach(self, token: str) -> Attach:
        """The first message of the control connection; `token` authorises the step connection."""
        return Attach(
            owner=self.owner,
            layout=self.layout,
            num_heads=self.heads.num_heads,
            kv_heads=self.kv_heads,
            scale=self.scale,
            latent_dim=self.heads.latent_dim,
            rules=self.rules,
            num_blocks=self.num_blocks,
            threads=self.threads,
            token=token,
            ring_bytes=self.ring_bytes,
        )


def spin_s(num_workers: int, threads: int, cores: int) -> float:
    """How long the model worker and the attention workers of one host poll for messages before they
    sleep. Waking takes longer than most waits, but a polling side keeps a core busy: long polls
    need a core for each thread of each side."""
    return LONG_SPIN_S if (1 + num_workers) * threads <= cores else SHORT_SPIN_S


def ring_bytes(heads: HeadShape, element_bytes: int, max_rows: int) -> int:
    """Ring size with room for two steps' rows of a layer, so that no side waits for the other to
    read. A multiple of 4,096 bytes, at least 1 MiB."""
    row = heads.row_heads * heads.head_dim * element_bytes
    return -(-max(2 * row * max_rows, 1 << 20) // 4096) * 4096


@dataclass(frozen=True, slots=True)
class _Dialer:
    """Makes connections to one attention worker."""

    address: PeerAddress
    me: InstanceId
    secret: bytes
    use_shm: bool
    tls: PeerTls | None

    @property
    def is_local(self) -> bool:
        """Whether the connections stay on this host."""
        address = self.address
        return self.use_shm and bool(address.unix_name) and shm.host_id() == address.host_id

    def dial(self) -> FrameSocket:
        """Returns an authenticated connection. Raises TransportError, AuthError or OSError."""
        by_s, address = time.monotonic() + DIAL_S, self.address
        if self.is_local:
            frames = FrameSocket(shm.connect(address.unix_name, by_s))
        else:
            sock = tcp.connect(address.tcp_host, address.tcp_port, by_s)
            frames = FrameSocket(sock) if self.tls is None else connected(self.tls, sock)
        try:
            frames.begin(by_s)
            identity = Identity(instance_id=self.me, service=SERVICE, fingerprint=b"")
            found = authenticate_frames(frames, ClientHandshake(self.secret, identity), by_s)
            if found.instance_id != address.instance_id:
                raise AuthError(f"another instance, {found.instance_id!r}, listens at its address")
        except BaseException:
            frames.close()
            raise
        return frames


class AttentionClient:
    """The connections to a remote attention worker. Made by `connect`; `command` is thread-safe."""

    def __init__(self, frames: FrameSocket, channel: AttentionChannel, attached: Attached) -> None:
        self.channel = channel
        self.attached = attached
        self._frames = frames
        self._sending = threading.Lock()

    def command(self, command: AttentionCommand) -> None:
        """Sends a command. A lost connection is reported to the listener, not here."""
        with self._sending:
            try:
                self._frames.send_frame(ENCODER.encode(command), time.monotonic() + SEND_S)
            except TransportError:
                self._frames.interrupt()

    def listen(
        self, on_event: Callable[[AttentionEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Starts a thread that passes events to `on_event` until the connection ends, and then
        calls `on_lost` with the reason."""

        def run() -> None:
            why = "its messages are malformed"
            try:
                while True:
                    on_event(EVENT.decode(receive_any(self._frames)))
            except (TransportError, *MALFORMED) as error:
                why = str(error)
            finally:
                self.close()
                on_lost(why)

        threading.Thread(target=run, name="attention-listener", daemon=True).start()

    def close(self) -> None:
        self._frames.interrupt()
        self.channel.close()


class LocalAttentionWorker:
    """The attention worker in the instance's own process, with the interface of `AttentionClient`.
    `start_local_attention` makes it."""

    def __init__(
        self, state: AttentionWorkerState, executor: AttentionExecutor, attached: Attached
    ) -> None:
        self.executor = executor
        self.attached = attached
        self._state = state
        self._on_event: Callable[[AttentionEvent], None] = lambda event: None

    def command(self, command: AttentionCommand) -> None:
        self._state.perform(command)
        self._on_event(ReceivedBytes(num_bytes=self._state.received_bytes()))

    def listen(
        self, on_event: Callable[[AttentionEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Events go to `on_event` from now on. A local worker is lost only together with its
        instance."""
        self._on_event = on_event

    def post(self, event: MessengerEvent) -> None:
        """Passes on an event of its messenger; none comes before `listen`, because no command was
        sent before."""
        if isinstance(event, FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded):
            self._on_event(event)

    def close(self) -> None:
        self._state.close()


def start_local_attention(
    state: AttentionWorkerState, options: AttachOptions
) -> LocalAttentionWorker:
    """Raises AttentionError."""
    workers: list[LocalAttentionWorker] = []
    try:
        attached = state.attach(options.attach(""), lambda event: workers[0].post(event))
    except (AttachError, ArenaError, OSError) as error:
        raise AttentionError(f"the instance's own memory: {error}") from error
    executor = state.executor()
    assert executor is not None
    workers.append(LocalAttentionWorker(state, executor, attached))
    return workers[0]


def connect(
    address: PeerAddress,
    me: InstanceId,
    secret: bytes,
    options: AttachOptions,
    use_shm: bool,
    tls: PeerTls | None = None,
) -> AttentionClient:
    """Connects and attaches to an attention worker, on another machine with `tls`. Raises
    AttentionError."""
    dialer = _Dialer(address, me, secret, use_shm, tls)
    token = secrets.token_hex(16)
    try:
        frames = dialer.dial()
        try:
            attached = _attach(frames, options, token)
            return AttentionClient(frames, _open_steps(dialer, options, token), attached)
        except BaseException:
            frames.close()
            raise
    except (
        TransportError,
        AuthError,
        AttentionChannelError,
        OSError,
        msgspec.DecodeError,
    ) as error:
        raise AttentionError(f"{address.instance_id}: {error}") from error


def receive_any(frames: FrameSocket) -> bytes:
    """Returns the next frame, however long it takes."""
    while True:
        with contextlib.suppress(DeadlineError):
            return frames.receive_frame(MAX_FRAME_BYTES, time.monotonic() + LISTEN_S)


def _attach(frames: FrameSocket, options: AttachOptions, token: str) -> Attached:
    by_s = time.monotonic() + ATTACH_S
    frames.send_frame(ENCODER.encode(options.attach(token)), by_s)
    reply: Attached | AttentionRefused = ATTACH_REPLY.decode(
        frames.receive_frame(MAX_FRAME_BYTES, by_s)
    )
    if isinstance(reply, AttentionRefused):
        raise AttentionChannelError(reply.reason)
    return reply


def _open_steps(dialer: _Dialer, options: AttachOptions, token: str) -> AttentionChannel:
    frames = dialer.dial()
    rings = dialer.is_local and rings_available()
    opening = ENCODER.encode(OpenSteps(token=token, rings=rings, spin_s=options.spin_s))
    frames.send_frame(opening, time.monotonic() + DIAL_S)
    sock = frames.socket
    if rings:
        return offer_rings(sock, options.ring_bytes, STEP_TIMEOUT_S, options.spin_s)
    if isinstance(frames, TlsFrameSocket):
        return TlsChannel(frames, STEP_TIMEOUT_S, reads_ahead=True)
    return SocketChannel(sock, STEP_TIMEOUT_S, reads_ahead=True)
