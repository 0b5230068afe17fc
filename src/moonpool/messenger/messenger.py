"""Moves KVCache blocks between this instance and its peers. One per worker process.

Threads: one accepts connections, one serves each of them (`inbound`), and each operation begun here
has one while it lasts (`links`). All methods return at once; how an operation ended is posted (see
`kvcache.transfers`). Which blocks may be touched, and which reads are granted, the worker decides.
`close` ends every operation and every thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import FetchEnded, MessengerEvent, PeerAddress, SendEnded
from moonpool.messenger import shm, tcp
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import AuthError, Identity
from moonpool.messenger.counters import TransferCounts
from moonpool.messenger.courier import Courier
from moonpool.messenger.fetch import Fetch
from moonpool.messenger.fetch_parts import FetchParts, split
from moonpool.messenger.fetch_shares import FetchShares
from moonpool.messenger.gate import LayerGate
from moonpool.messenger.inbound import Inbound
from moonpool.messenger.landing import Landing
from moonpool.messenger.landing_table import Checksum, checksum_slice
from moonpool.messenger.links import Links, Operation, Tell
from moonpool.messenger.mover import Mover, PlainMover
from moonpool.messenger.native_mover import NativeMover, SliceCalls, fits
from moonpool.messenger.peer_arena import PeerArenas
from moonpool.messenger.peering import HANDSHAKE_TIMEOUT_S, Credentials, Route
from moonpool.messenger.progress import Progress
from moonpool.messenger.read import Reads
from moonpool.messenger.receive_stream import Receptions
from moonpool.messenger.send_stream import SendStream, SliceRef
from moonpool.messenger.station import Station
from moonpool.types import BlockId, BlockKey, InstanceId

PARK_S = 5.0
TCP_CONNECTIONS = 4
_CLOSE_TIMEOUT_S = HANDSHAKE_TIMEOUT_S + 1.0
_CLOSED = "this messenger was closed"
_MAX_TIMEOUT_S = 86400.0  # sockets and polls overflow on what is near to infinity
_log = logging.getLogger(__name__)


class Messenger:
    """`layout` is of whole blocks, also where the arena keeps a share of each.
    `post` is called from messenger threads and must not block. `lease_s` bounds how long a peer
    may hold our blocks; `park_s` how long a stream's sender waits to be expected. `courier`, which
    ends with the messenger, is for peers that have one too."""

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
        courier: Courier | None = None,
        native: SliceCalls | None = None,
        tcp_connections: int = TCP_CONNECTIONS,
    ) -> None:
        """With `native`, slices are moved by it, if it takes those of this layout. A large fetch
        from another machine goes over up to `tcp_connections` at once."""
        if arena.cut is None and layout != arena.layout:
            raise ValueError("the arena was made for another block layout")
        if not secret:
            raise AuthError("the cluster secret is empty; every part needs the same one")
        identity = Identity(
            instance_id=instance_id, service="blocks", fingerprint=layout.fingerprint
        )
        host_id = shm.host_id() if use_shared_memory else ""
        mover: Mover = PlainMover(checksum)
        if native is not None and fits(arena):
            mover = NativeMover(native)
        self._station = Station(instance_id, arena, post, mover, checksum=checksum)
        self._host_id = host_id
        self._block_tokens = layout.block_tokens
        self._tcp_address = (tcp_host, tcp_port)
        self._tcp_connections = tcp_connections
        self._receptions = Receptions(self._station, park_s)
        self._reads = Reads(self._station, lease_s)
        own = Credentials(secret, identity, host_id, arena, PeerArenas(), mover, courier)
        self._courier = courier
        self._links = Links(own, self._spawn)
        self._inbound = Inbound(self._station, own, self._reads, self._receptions, self._spawn)
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what follows
        self._fetches: dict[str, FetchParts] = {}
        self._sends: dict[str, SendStream] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def start(self) -> PeerAddress:
        """Listens, and tells where. Raises OSError if the TCP port cannot be had."""
        assert self._acceptor is None, "a messenger is started once"
        host, port = self._tcp_address
        listeners = [tcp.listen(host, port)]
        if self._courier is not None:
            listeners.append(tcp.listen(host, 0))
            self._courier.port = listeners[1].getsockname()[1]
        unix_name = ""
        if self._host_id:
            unix_name = f"moonpool-{secrets.token_hex(12)}"
            try:
                listeners.append(shm.listen(unix_name))
            except OSError as error:
                _log.warning("no shared memory with peers, only tcp: %s", error)
                unix_name = ""
        address = PeerAddress(
            instance_id=self._station.instance_id,
            host_id=self._host_id,
            unix_name=unix_name,
            tcp_host=host,
            tcp_port=listeners[0].getsockname()[1],
            nixl_port=0 if self._courier is None else self._courier.port,
        )
        self._acceptor = self._spawn("accept", lambda: self._inbound.accept(listeners))
        return address

    def close(self) -> None:
        """Ends every operation (each still posts its end) and every thread, within seconds."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._inbound.stop_accepting()
        if self._acceptor is not None:
            self._acceptor.join(_CLOSE_TIMEOUT_S)  # from here on nobody comes in
        with self._lock:
            fetches, sends = list(self._fetches.values()), list(self._sends.values())
            threads = list(self._threads)
        self._reads.close(_CLOSED)
        self._receptions.close(_CLOSED)
        for fetch in fetches:
            fetch.break_off(_CLOSED)
        for stream in sends:
            stream.abort(_CLOSED)
        self._links.close()
        self._inbound.interrupt()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if self._courier is not None:
            self._courier.close()

    def counts(self) -> TransferCounts:
        return self._station.counters.counts()

    def forget_sums(self, block_ids: Sequence[BlockId], first_token: int, end_token: int) -> None:
        """Tokens first_token ... end_token - 1 of the sequence that lies in these blocks are about
        to be written, by somebody other than this messenger."""
        size = self._block_tokens
        self._station.arena.sums.forget(block_ids[first_token // size : -(-end_token // size)])

    # Reading a peer's cached blocks, and serving such reads

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
        gate: LayerGate | None = None,
    ) -> None:
        """Pulls `keys` into `block_ids`, one each. Ends with FetchEnded; before that, with a
        `gate`, FetchProgress tells how far it is."""
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys but {len(block_ids)} blocks to fetch them into")
        station = self._station
        most = self._tcp_connections if self._links.only_tcp(source) else 1
        rows = split(len(keys), station.arena.layout.block_bytes, most)
        progress = None if gate is None else Progress(fetch_id, [*map(len, rows)], gate, station)
        parts = FetchParts(
            fetch_id,
            source.instance_id,
            keys,
            rows,
            lambda part: self._landing(block_ids[part.start : part.stop], 0),
            _deadline_s(timeout_s),
            progress,
        )
        with self._lock:
            if fetch_id in self._fetches:
                raise ValueError(f"fetch {fetch_id!r} is in progress already")
            self._fetches[fetch_id] = parts
            if self._closing:
                parts.break_off(_CLOSED)

        def end(part: int, ended: FetchEnded) -> Tell:
            whole = parts.end(part, ended)
            if whole is None:
                return _nothing
            with self._lock:
                del self._fetches[fetch_id]

            def tell() -> None:
                station.post(whole)
                if progress is not None:
                    progress.end(whole)

            return tell

        for number, part in enumerate(rows):
            blocks = block_ids[part.start : part.stop]
            self._run_fetch(source, parts.parts[number], blocks, partial(end, number))

    def _run_fetch(
        self,
        source: PeerAddress,
        fetch: Fetch,
        block_ids: Sequence[BlockId],
        end: Callable[[FetchEnded], Tell],
    ) -> None:
        def operate(route: Route) -> Tell:
            ended = fetch.run(route, self._station)
            if isinstance(ended, FetchEnded):
                return end(ended)
            addresses = ended
            if len(addresses) == 1:
                return lambda: self._links.run(addresses[0], operate, fetch.opening())
            return lambda: self._fetch_shares(fetch, addresses, block_ids, end)

        self._links.run(source, operate, fetch.opening())

    def _fetch_shares(
        self,
        fetch: Fetch,
        addresses: Sequence[PeerAddress],
        block_ids: Sequence[BlockId],
        end: Callable[[FetchEnded], Tell],
    ) -> None:
        with self._lock:  # `close` breaks off what it finds
            shares = FetchShares(fetch, len(addresses), lambda: self._landing(block_ids, 0))

        def operation(share: Fetch) -> Operation:
            def operate(route: Route) -> Tell:
                ended = share.run(route, self._station)
                assert isinstance(ended, FetchEnded), "a share is not sent on"
                whole = shares.end(ended)
                return _nothing if whole is None else end(whole)

            return operate

        for address, share in zip(addresses, shares.shares, strict=True):
            self._links.run(address, operation(share), share.opening())

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Answers ReadRequested: the first `len(block_ids)` of its keys are in these blocks, which
        stay as they are until ReadEnded."""
        self._reads.grant(read_id, block_ids)

    def send_read_on(self, read_id: str, *addresses: PeerAddress) -> None:
        """The other answer to ReadRequested: its blocks are kept by other peers."""
        self._reads.send_on(read_id, addresses)

    # Sending a layer stream

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        """Connects in the background; `timeout_s` covers the whole stream. Ends with SendEnded."""

        def end(event: SendEnded) -> None:
            with self._lock:
                del self._sends[stream_id]
            self._station.post(event)

        def follow(addresses: tuple[PeerAddress, ...]) -> None:
            if len(addresses) == 1:
                self._links.run(addresses[0], stream.run, stream.opening())
                return
            for address, share in zip(addresses, stream.divide(len(addresses)), strict=False):
                self._links.run(address, share.run, share.opening())

        deadline_s = _deadline_s(timeout_s)
        with self._lock:
            if stream_id in self._sends:
                raise ValueError(f"stream {stream_id!r} is open already")
            target_id = target.instance_id
            stream = SendStream(self._station, stream_id, target_id, deadline_s, end, follow)
            self._sends[stream_id] = stream
            closing = self._closing
        if closing:
            stream.abort(_CLOSED)
        self._links.run(target, stream.run, stream.opening())

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
        landing = self._landing(block_ids, first_index, takes_unnamed=True)
        self._receptions.expect(stream_id, landing, _deadline_s(timeout_s))
        self._inbound.wake()

    def expect_at(self, stream_id: str, *addresses: PeerAddress) -> None:
        """The stream is received for us by other peers, a share by each: its sender, which comes to
        us, is sent there. Until `forget_stream`."""
        self._receptions.expect_at(stream_id, addresses)

    def forget_stream(self, stream_id: str) -> None:
        self._receptions.forget(stream_id)
        with self._lock:
            closing = self._closing
        if closing:
            self._receptions.cancel(stream_id, _CLOSED)

    def cancel(self, stream_id: str) -> None:
        """Ends an expected stream early. Ignored if it has ended."""
        self._receptions.cancel(stream_id, "the stream was cancelled")

    # Threads and connections

    def _landing(
        self, block_ids: Sequence[BlockId], first_index: int, takes_unnamed: bool = False
    ) -> Landing:
        station = self._station
        sizes = station.mover.group_bytes, takes_unnamed
        return Landing(station.arena, block_ids, first_index, station.counters, *sizes)

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


def _nothing() -> None:
    """Others are still under way."""


def _deadline_s(timeout_s: float) -> float:
    return time.monotonic() + min(timeout_s, _MAX_TIMEOUT_S)
