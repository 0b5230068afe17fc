"""Moves KVCache blocks between this instance and its peers. One per worker process.

Threads: one accepts connections, and each operation has one of its own while it lasts. All methods
return at once; how an operation ended is posted (see `events`). Which blocks may be touched, and
which reads are granted, the worker decides. `close` ends every operation and every thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import MessengerEvent, PeerAddress, SendEnded
from moonpool.messenger import shm, tcp
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import AuthError, Identity
from moonpool.messenger.counters import TransferCounts
from moonpool.messenger.fetch import Fetch
from moonpool.messenger.landing import Checksum, Landing, checksum_slice
from moonpool.messenger.peering import HANDSHAKE_TIMEOUT_S, Credentials, admit, dial
from moonpool.messenger.read import Reads
from moonpool.messenger.receive_stream import Receptions
from moonpool.messenger.send_stream import SendStream, SliceRef
from moonpool.messenger.station import Station
from moonpool.messenger.transport import Connection, FrameSocket, ProtocolError, TransportError
from moonpool.messenger.wire import OpenStream, ReadBlocks
from moonpool.types import BlockId, BlockKey, InstanceId

PARK_S = 5.0
MAX_INBOUND_CONNECTIONS = 256
_CLOSE_TIMEOUT_S = HANDSHAKE_TIMEOUT_S + 1.0
_MAX_TIMEOUT_S = 86400.0  # sockets and polls overflow on what is near to infinity
_log = logging.getLogger(__name__)


class Messenger:
    """`post` is called from messenger threads and must not block. `lease_s` bounds how long a peer
    may hold our blocks; `park_s` how long a stream's sender waits to be expected."""

    def __init__(
        self,
        arena: Arena,
        layout: BlockLayout,
        instance_id: InstanceId,
        secret: bytes,
        post: Callable[[MessengerEvent], None],
        tcp_host: str = "127.0.0.1",
        tcp_port: int = 0,
        lease_s: float = 30.0,
        park_s: float = PARK_S,
        use_shared_memory: bool = True,
        checksum: Checksum = checksum_slice,
    ) -> None:
        if layout != arena.layout:
            raise ValueError("the arena was made for another block layout")
        if not secret:
            raise AuthError("the cluster secret is empty; every part needs the same one")
        identity = Identity(
            instance_id=instance_id, service="blocks", fingerprint=layout.fingerprint
        )
        host_id = shm.host_id() if use_shared_memory else ""
        self._station = Station(instance_id, arena, post, checksum=checksum)
        self._credentials = Credentials(secret, identity, host_id)
        self._tcp_address = (tcp_host, tcp_port)
        self._receptions = Receptions(self._station, park_s)
        self._reads = Reads(self._station, lease_s)
        self._wake_fd = -1
        self._listeners: list[socket.socket] = []
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what follows
        self._fetches: dict[str, Fetch] = {}
        self._sends: dict[str, SendStream] = {}
        self._inbound: set[FrameSocket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def start(self) -> PeerAddress:
        """Listens, and tells where. Raises OSError if the TCP port cannot be had."""
        assert not self._listeners, "a messenger is started once"
        host, port = self._tcp_address
        listener = tcp.listen(host, port)
        self._listeners.append(listener)
        unix_name = ""
        if self._credentials.host_id:
            unix_name = f"moonpool-{secrets.token_hex(12)}"
            try:
                self._listeners.append(shm.listen(unix_name))
            except OSError as error:
                _log.warning("no shared memory with peers, only tcp: %s", error)
                unix_name = ""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._acceptor = self._spawn("accept", self._accept)
        return PeerAddress(
            instance_id=self._station.instance_id,
            host_id=self._credentials.host_id,
            unix_name=unix_name,
            tcp_host=host,
            tcp_port=listener.getsockname()[1],
        )

    def close(self) -> None:
        """Ends every operation (each still posts its end) and every thread, within seconds."""
        reason = "this messenger was closed"
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        if self._acceptor is not None:
            self._acceptor.join(_CLOSE_TIMEOUT_S)  # from here on nobody comes in
        with self._lock:
            fetches, sends = list(self._fetches.values()), list(self._sends.values())
            inbound, threads = list(self._inbound), list(self._threads)
        self._reads.close(reason)
        self._receptions.close(reason)
        for fetch in fetches:
            fetch.line.break_off(reason)
        for stream in sends:
            stream.abort(reason)
        for frames in inbound:
            frames.interrupt()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def counts(self) -> TransferCounts:
        return self._station.counters.counts()

    # Reading a peer's cached blocks, and serving such reads

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
    ) -> None:
        """Pulls `keys` into `block_ids`, one each. Ends with FetchEnded."""
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys but {len(block_ids)} blocks to fetch them into")
        deadline_s = _deadline_s(timeout_s)
        landing = self._landing(block_ids, 0)
        fetch = Fetch(fetch_id, source.instance_id, tuple(keys), landing, deadline_s)
        with self._lock:
            if fetch_id in self._fetches:
                raise ValueError(f"fetch {fetch_id!r} is in progress already")
            self._fetches[fetch_id] = fetch

        def run() -> None:
            ended = fetch.run(lambda by_s: self._dial(source, by_s), self._station)
            with self._lock:
                del self._fetches[fetch_id]
            self._station.post(ended)

        self._spawn("fetch", run)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Answers ReadRequested: the first `len(block_ids)` of its keys are in these blocks, which
        stay as they are until ReadEnded."""
        self._reads.grant(read_id, block_ids)

    # Sending a layer stream

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        """Connects in the background; `timeout_s` covers the whole stream. Ends with SendEnded."""

        def end(event: SendEnded) -> None:
            with self._lock:
                del self._sends[stream_id]
            self._station.post(event)

        deadline_s = _deadline_s(timeout_s)
        with self._lock:
            if stream_id in self._sends:
                raise ValueError(f"stream {stream_id!r} is open already")
            stream = SendStream(self._station, stream_id, target.instance_id, deadline_s, end)
            self._sends[stream_id] = stream
        self._spawn("send", lambda: stream.run(lambda by_s: self._dial(target, by_s)))

    def send(self, stream_id: str, slices: Sequence[SliceRef]) -> None:
        """Queues slices, each (index, block id, layer), which must not change until SendEnded.
        Takes microseconds; from any thread. Ignored if the stream has ended."""
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.send(slices)

    def finish_stream(self, stream_id: str) -> None:
        """No more slices: SendEnded follows when the receiver has verified all."""
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.finish()

    def abort_stream(self, stream_id: str) -> None:
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.abort("the stream was aborted")

    # Receiving a layer stream

    def expect(
        self, stream_id: str, block_ids: Sequence[BlockId], first_index: int, timeout_s: float
    ) -> None:
        """Index `first_index + i` of the stream goes to `block_ids[i]`. Ends with ReceiveEnded."""
        if first_index < 0:
            raise ValueError(f"first_index {first_index} is negative")
        landing = self._landing(block_ids, first_index)
        self._receptions.expect(stream_id, landing, _deadline_s(timeout_s))
        with self._lock:
            closing = self._closing
            if not closing and self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)  # there may be an earlier deadline now
        if closing:
            self._receptions.cancel(stream_id, "this messenger was closed")

    def cancel(self, stream_id: str) -> None:
        """Ends an expected stream early. Ignored if it has ended."""
        self._receptions.cancel(stream_id, "the stream was cancelled")

    # Threads and connections

    def _landing(self, block_ids: Sequence[BlockId], first_index: int) -> Landing:
        return Landing(self._station.arena, block_ids, first_index, self._station.counters)

    def _dial(self, peer: PeerAddress, deadline_s: float) -> Connection:
        with self._lock:
            if self._closing:
                raise TransportError("this messenger was closed")
        return dial(peer, self._credentials, self._station.arena, deadline_s)

    def _spawn(self, what: str, run: Callable[[], None]) -> threading.Thread:
        def tracked() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        name = f"messenger-{what}-{self._station.instance_id}"
        thread = threading.Thread(target=tracked, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        selector.register(self._wake_fd, selectors.EVENT_READ)
        while not self._closing:
            deadline_s = self._receptions.next_deadline_s()
            now_s = time.monotonic()
            for key, _ in selector.select(None if deadline_s is None else deadline_s - now_s):
                if isinstance(key.fileobj, socket.socket):
                    self._accept_one(key.fileobj)
                else:
                    os.eventfd_read(self._wake_fd)
            self._receptions.expire(time.monotonic())
        selector.close()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)  # out of descriptors: do not spin
            return
        frames = FrameSocket(sock)
        with self._lock:
            full = len(self._inbound) >= MAX_INBOUND_CONNECTIONS
            if not full:
                self._inbound.add(frames)
        if full:
            frames.close()
            self._station.counters.refused()
            _log.warning("refused a connection: %d are open", MAX_INBOUND_CONNECTIONS)
        else:
            self._spawn("serve", lambda: self._serve(frames))

    def _serve(self, frames: FrameSocket) -> None:
        """One inbound connection, from handshake to close."""
        try:
            if frames.socket.family != socket.AF_UNIX:
                tcp.prepare(frames.socket)
            connection = admit(frames, self._credentials, self._station.arena)
            try:
                opening = connection.receive(time.monotonic() + HANDSHAKE_TIMEOUT_S)
                if isinstance(opening, OpenStream):
                    self._receptions.serve(connection, opening)
                elif isinstance(opening, ReadBlocks):
                    self._reads.serve(connection, opening)
                else:
                    raise ProtocolError(f"unexpected {type(opening).__name__} at the start")
            finally:
                connection.close()
        except (AuthError, TransportError, OSError) as error:
            if not self._closing:
                self._station.counters.refused()
                _log.warning("closed a connection to %s: %s", self._station.instance_id, error)
        finally:
            frames.close()
            with self._lock:
                self._inbound.discard(frames)


def _deadline_s(timeout_s: float) -> float:
    return time.monotonic() + min(timeout_s, _MAX_TIMEOUT_S)
