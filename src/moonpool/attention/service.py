"""The door of an attention worker: takes connections of its model worker, proves who they are, and
runs one thread for each. A newer owner of the same name takes the place of one that is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time

import msgspec

from moonpool.attention.client import receive_any
from moonpool.attention.control import (
    ENCODER,
    MAX_FRAME_BYTES,
    OPENING,
    ORDER,
    SERVICE,
    Attach,
    Received,
    Refused,
    Steps,
    Told,
)
from moonpool.attention.keeper import AttachError, Keeper
from moonpool.attention.port import Port, PortError, SocketPort, rings_available, take_rings
from moonpool.kvcache.transfers import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.messenger import shm, tcp
from moonpool.messenger.arena import ArenaError
from moonpool.messenger.auth import AuthError, Identity, ServerHandshake, authenticate_frames
from moonpool.messenger.transport import FrameSocket, TransportError
from moonpool.types import InstanceId

HANDSHAKE_S = 5.0
SEND_S = 5.0
MAX_CONNECTIONS = 16
MOST_SPIN_S = 0.01

log = logging.getLogger("moonpool.attention")


class AttentionService:
    """`start`, then `close`."""

    def __init__(
        self, instance_id: InstanceId, secret: bytes, keeper: Keeper, host: str, use_shm: bool
    ) -> None:
        self._instance_id = instance_id
        self._secret = secret
        self._keeper = keeper
        self._host = host
        self._host_id = shm.host_id() if use_shm else ""
        self._lock = threading.Lock()  # guards what follows
        self._open: set[socket.socket] = set()
        self._step_sockets: set[socket.socket] = set()
        self._token = ""
        self._owner: FrameSocket | None = None
        self._owner_gone = threading.Event()
        self._owner_gone.set()
        self._steps_over = threading.Event()
        self._steps_over.set()
        self._closing = False
        self._listeners: list[socket.socket] = []

    def start(self) -> PeerAddress:
        """Raises OSError if it cannot listen."""
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
        with self._lock:
            self._closing = True
            sockets = [*self._listeners, *self._open]
        for sock in sockets:
            _shut(sock)
        self._owner_gone.wait(SEND_S)
        self._steps_over.wait(SEND_S)
        self._keeper.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, _ = listener.accept()
            except OSError:
                break
            with self._lock:
                full = len(self._open) >= MAX_CONNECTIONS
                if not full:
                    self._open.add(sock)
            if full:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        listener.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._serve_one(sock)
        except (AuthError, TransportError, PortError, OSError) as error:
            if not self._closing:
                log.warning("closed a connection: %s", error)
        except msgspec.DecodeError as error:
            log.warning("closed a connection that talked nonsense: %s", error)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _serve_one(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            tcp.prepare(sock)
        frames = FrameSocket(sock)
        me = Identity(instance_id=self._instance_id, service=SERVICE, fingerprint=b"")
        by_s = time.monotonic() + HANDSHAKE_S
        authenticate_frames(frames, ServerHandshake(self._secret, me), by_s)
        opening = OPENING.decode(frames.receive_frame(MAX_FRAME_BYTES, by_s))
        if isinstance(opening, Steps):
            self._serve_steps(sock, opening)
        else:
            self._serve_owner(frames, opening)

    def _serve_steps(self, sock: socket.socket, opening: Steps) -> None:
        if not self._token or not hmac.compare_digest(opening.token, self._token):
            raise PortError("its token is not the owner's")
        port: Port
        if opening.rings and sock.family == socket.AF_UNIX and rings_available():
            port = take_rings(sock, None, min(opening.spin_s, MOST_SPIN_S))
            sock.settimeout(None)
        else:
            port = SocketPort(sock, None)
        with self._lock:
            self._step_sockets.add(sock)
            self._steps_over.clear()
        try:
            self._keeper.serve_steps(port)
        finally:
            port.close()
            with self._lock:
                self._step_sockets.discard(sock)
                if not self._step_sockets:
                    self._steps_over.set()

    def _serve_owner(self, frames: FrameSocket, wanted: Attach) -> None:
        """One owner, from attach to its end."""
        self._displace()
        sending = threading.Lock()

        def tell(event: MessengerEvent) -> None:
            if isinstance(event, FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded):
                self._send(frames, sending, event)  # there is no store that could tell more

        try:
            attached = self._keeper.attach(wanted, tell)
        except (AttachError, ArenaError, OSError, ValueError) as error:
            body = ENCODER.encode(Refused(reason=str(error)))
            frames.send_frame(body, time.monotonic() + SEND_S)
            return
        with self._lock:
            self._owner, self._token = frames, wanted.token
            self._owner_gone.clear()
        log.info(
            "keeps %d blocks for %s, %d of them known from before",
            attached.num_blocks, wanted.owner, len(attached.named),
        )  # fmt: skip
        try:
            frames.send_frame(ENCODER.encode(attached), time.monotonic() + SEND_S)
            self._obey(frames, sending)
        finally:
            with self._lock:
                self._owner, self._token = None, ""
                steps = list(self._step_sockets)
            for sock in steps:
                _shut(sock)
            self._keeper.detach()
            self._owner_gone.set()

    def _obey(self, frames: FrameSocket, sending: threading.Lock) -> None:
        while True:
            self._keeper.perform(ORDER.decode(receive_any(frames)))
            self._send(frames, sending, Received(num_bytes=self._keeper.received_bytes()))

    def _send(self, frames: FrameSocket, sending: threading.Lock, told: Told) -> None:
        with sending:
            try:
                frames.send_frame(ENCODER.encode(told), time.monotonic() + SEND_S)
            except TransportError:
                frames.interrupt()  # the owner is gone: its thread finds out

    def _displace(self) -> None:
        """Waits until the owner before is gone, and its steps are over."""
        with self._lock:
            former = self._owner
        if former is not None:
            former.interrupt()
        if not (self._owner_gone.wait(SEND_S) and self._steps_over.wait(SEND_S)):
            raise PortError("the owner before does not go")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
