"""The server of an attention worker: accepts and authenticates its model worker's connections.

One thread serves each connection. The newest owner that attaches replaces the previous one.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import threading
import time

from moonpool.link.auth import AuthError, Identity, ServerHandshake
from moonpool.link.tls import PeerTls
from moonpool.log_limit import limited_logger
from moonpool.protocol.transfer_events import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import MALFORMED, InstanceId
from moonpool_engine.attention_offload.channel import (
    AttentionChannel,
    AttentionChannelError,
    SocketChannel,
    rings_available,
    take_rings,
)
from moonpool_engine.attention_offload.client import receive_any
from moonpool_engine.attention_offload.tls_channel import TlsChannel
from moonpool_engine.attention_offload.wire import (
    COMMAND,
    ENCODER,
    MAX_FRAME_BYTES,
    OPENING,
    SERVICE,
    Attach,
    AttentionEvent,
    AttentionRefused,
    OpenSteps,
    ReceivedBytes,
)
from moonpool_engine.attention_offload.worker_state import AttachError, AttentionWorkerState
from moonpool_engine.transfer import shm, tcp
from moonpool_engine.transfer.arena import ArenaError
from moonpool_engine.transfer.authentication import authenticate_frames
from moonpool_engine.transfer.errors import PeerGoneError, TransportError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.tls_frames import TlsFrameSocket, accepted

HANDSHAKE_S = 5.0
SEND_S = 5.0
MAX_CONNECTIONS = 16
MAX_HALF_OPEN = 8
MAX_SPIN_S = 0.01

log = limited_logger("moonpool_engine.attention_offload")


class AttentionService:
    """Serves one `AttentionWorkerState`. Call `start`, then `close`."""

    def __init__(
        self,
        instance_id: InstanceId,
        secret: bytes,
        state: AttentionWorkerState,
        host: str,
        use_shm: bool,
        tls: PeerTls | None = None,
    ) -> None:
        """With `tls`, connections from other machines are encrypted."""
        self._instance_id = instance_id
        self._secret = secret
        self._state = state
        self._host = host
        self._tls = tls
        self._host_id = shm.host_id() if use_shm else ""
        self._lock = threading.Lock()  # guards the fields below
        self._open: set[FrameSocket] = set()
        # connections without proof, oldest first; they are also in `_open`
        self._half_open: dict[FrameSocket, None] = {}
        self._step_sockets: set[FrameSocket] = set()
        self._token = ""
        self._owner: FrameSocket | None = None
        self._owner_gone = threading.Event()
        self._owner_gone.set()
        self._steps_over = threading.Event()
        self._steps_over.set()
        self._closing = False
        self._listeners: list[socket.socket] = []

    def start(self) -> PeerAddress:
        """Listens, and returns the address at which it listens. Raises OSError."""
        self._listeners = [tcp.listen(self._host, 0)]
        unix_name = ""
        if self._host_id:
            unix_name = f"moonpool-attention-{secrets.token_hex(12)}"
            self._listeners.append(shm.listen(unix_name))
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return PeerAddress(
            instance_id=self._instance_id,
            host_id=self._host_id,
            unix_name=unix_name,
            tcp_host=self._host,
            tcp_port=self._listeners[0].getsockname()[1],
        )

    def close(self) -> None:
        """Ends all connections, then the worker's state."""
        with self._lock:
            self._closing = True
            connections = list(self._open)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for frames in connections:
            frames.interrupt()
        self._owner_gone.wait(SEND_S)
        self._steps_over.wait(SEND_S)
        self._state.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing or error.errno not in (errno.EMFILE, errno.ENFILE):
                    break
                time.sleep(0.05)
                continue
            try:
                frames = self._framed(sock)
            except PeerGoneError:
                continue  # the peer has left already
            with self._lock:
                if len(self._half_open) >= MAX_HALF_OPEN:
                    oldest = next(iter(self._half_open))
                    oldest.interrupt()
                    self._half_open.pop(oldest)
                    self._open.discard(oldest)
                full = len(self._open) >= MAX_CONNECTIONS
                if not full:
                    self._open.add(frames)
                    self._half_open[frames] = None
            if full:
                frames.close()
                continue
            threading.Thread(target=self._serve, args=(frames,), daemon=True).start()
        listener.close()

    def _framed(self, sock: socket.socket) -> FrameSocket:
        """Raises PeerGoneError."""
        if self._tls is None or sock.family == socket.AF_UNIX:
            return FrameSocket(sock)
        return accepted(self._tls, sock)

    def _serve(self, frames: FrameSocket) -> None:
        try:
            self._serve_one(frames)
        except (AuthError, TransportError, AttentionChannelError, OSError) as error:
            if not self._closing:
                log.warning("closed a connection: %s", error)
        except MALFORMED as error:
            log.warning("closed a connection with malformed messages: %s", error)
        finally:
            with self._lock:
                self._open.discard(frames)
                self._half_open.pop(frames, None)
            frames.close()

    def _serve_one(self, frames: FrameSocket) -> None:
        if frames.socket.family != socket.AF_UNIX:
            tcp.prepare(frames.socket)
        me = Identity(instance_id=self._instance_id, service=SERVICE, fingerprint=b"")
        by_s = time.monotonic() + HANDSHAKE_S
        frames.begin(by_s)
        authenticate_frames(frames, ServerHandshake(self._secret, me), by_s)
        with self._lock:
            self._half_open.pop(frames, None)
        opening = OPENING.decode(frames.receive_frame(MAX_FRAME_BYTES, by_s))
        if isinstance(opening, OpenSteps):
            self._serve_steps(frames, opening)
        else:
            self._serve_owner(frames, opening)

    def _serve_steps(self, frames: FrameSocket, opening: OpenSteps) -> None:
        self._check_token(opening.token)
        sock = frames.socket
        channel: AttentionChannel
        if opening.rings and sock.family == socket.AF_UNIX and rings_available():
            channel = take_rings(sock, None, min(opening.spin_s, MAX_SPIN_S))
            sock.settimeout(None)
        elif isinstance(frames, TlsFrameSocket):
            channel = TlsChannel(frames, None)
        else:
            channel = SocketChannel(sock, None)
        try:
            # the owner may have been replaced meanwhile, and its end must find the new state
            with self._lock:
                self._check_token(opening.token)
                self._step_sockets.add(frames)
                self._steps_over.clear()
            self._state.serve_steps(channel)
        finally:
            channel.close()
            with self._lock:
                self._step_sockets.discard(frames)
                if not self._step_sockets:
                    self._steps_over.set()

    def _check_token(self, token: str) -> None:
        """Raises AttentionChannelError unless it is the current owner's."""
        if not self._token or not hmac.compare_digest(token, self._token):
            raise AttentionChannelError("its token is not that of the current owner")

    def _serve_owner(self, frames: FrameSocket, request: Attach) -> None:
        """Serves one owner, from its `Attach` to its end."""
        self._end_former_owner()
        sending = threading.Lock()

        def post(event: MessengerEvent) -> None:
            # All other events are those of SSD tiers, which attention workers do not have.
            if isinstance(event, FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded):
                self._send(frames, sending, event)

        try:
            attached = self._state.attach(request, post)
        except (AttachError, ArenaError, OSError, ValueError) as error:
            body = ENCODER.encode(AttentionRefused(reason=str(error)))
            frames.send_frame(body, time.monotonic() + SEND_S)
            return
        with self._lock:
            self._owner, self._token = frames, request.token
            self._owner_gone.clear()
        log.info(
            "holds %d blocks for %s, %d of them still cached from before",
            attached.num_blocks, request.owner, len(attached.cached),
        )  # fmt: skip
        try:
            frames.send_frame(ENCODER.encode(attached), time.monotonic() + SEND_S)
            self._serve_commands(frames, sending)
        finally:
            with self._lock:
                self._owner, self._token = None, ""
                steps = list(self._step_sockets)
            for connection in steps:
                connection.interrupt()
            self._state.detach()
            self._owner_gone.set()

    def _serve_commands(self, frames: FrameSocket, sending: threading.Lock) -> None:
        while True:
            self._state.perform(COMMAND.decode(receive_any(frames)))
            self._send(frames, sending, ReceivedBytes(num_bytes=self._state.received_bytes()))

    def _send(self, frames: FrameSocket, sending: threading.Lock, event: AttentionEvent) -> None:
        with sending:
            try:
                frames.send_frame(ENCODER.encode(event), time.monotonic() + SEND_S)
            except TransportError:
                frames.interrupt()  # ends the thread of an owner that is gone

    def _end_former_owner(self) -> None:
        """Disconnects the former owner, and waits until its steps are over."""
        with self._lock:
            former = self._owner
        if former is not None:
            former.interrupt()
        if not (self._owner_gone.wait(SEND_S) and self._steps_over.wait(SEND_S)):
            raise AttentionChannelError(
                "the former owner's connections do not end: try again later"
            )
