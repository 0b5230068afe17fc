"""Moves KVCache blocks between this instance and its peers. Each worker process has one messenger.

One thread accepts connections, one serves each accepted connection (`listener`), and each operation
that the instance has started has one while it runs (`connection_pool`). All methods return at once;
the end of an operation is posted as an event (see `protocol.transfer_events`). The worker decides
which blocks may be accessed, and which reads are granted. `close` ends every operation and every
thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.link.auth import AuthError, Identity
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress, SendEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.transfer import shm, tcp
from moonpool_engine.transfer.arena import Arena, PeerArenas
from moonpool_engine.transfer.connection_pool import (
    HANDSHAKE_TIMEOUT_S,
    ConnectionPool,
    Credentials,
)
from moonpool_engine.transfer.context import SliceRef, TransferContext
from moonpool_engine.transfer.counters import TransferCounts
from moonpool_engine.transfer.fetch import Fetch, WantedBlocks
from moonpool_engine.transfer.gate import LayerGate
from moonpool_engine.transfer.listener import PeerListener
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.nixl_agent import NixlAgent
from moonpool_engine.transfer.receive_stream import IncomingStreams
from moonpool_engine.transfer.send_stream import SendStream
from moonpool_engine.transfer.serve_read import IncomingReads
from moonpool_engine.transfer.slice_copier import PlainSliceCopier, SliceCopier

PARK_S = 5.0
TCP_CONNECTIONS = 4
_CLOSE_TIMEOUT_S = HANDSHAKE_TIMEOUT_S + 1.0
_CLOSED = "this messenger was closed"
_MAX_TIMEOUT_S = 86400.0  # sockets and polls overflow if timeouts are near infinity
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """`lease_s`: how long a peer may hold blocks without a sign of life. `park_s`: how long the
    sender of a stream waits until the stream is expected. `tcp_connections`: most connections that
    a large fetch from another machine uses at once."""

    lease_s: float = 30.0
    park_s: float = PARK_S
    tcp_connections: int = TCP_CONNECTIONS


USUAL_LIMITS = TransferLimits()


class Messenger:
    """`layout` describes whole blocks, even if the arena stores only a share of each.

    `post` is called from messenger threads and must not block. `nixl_agent`: used with peers that
    also have one; closed with the messenger.
    """

    def __init__(
        self,
        arena: Arena,
        layout: BlockLayout,
        peer: LocalPeer,
        post: Callable[[MessengerEvent], None],
        copier: SliceCopier | None = None,
        nixl_agent: NixlAgent | None = None,
        limits: TransferLimits = USUAL_LIMITS,
    ) -> None:
        """`copier`: the slice copier, by default one that needs no kernels."""
        if arena.shard_view is None and layout != arena.layout:
            raise ValueError("the arena was made for another block layout")
        if not peer.secret:
            raise AuthError("the cluster secret is empty; every part needs the same one")
        identity = Identity(
            instance_id=peer.instance_id, service="blocks", fingerprint=layout.fingerprint
        )
        host_id = shm.host_id() if peer.use_shared_memory else ""
        copier = PlainSliceCopier() if copier is None else copier
        self._context = TransferContext(peer.instance_id, arena, post, copier)
        self._host_id = host_id
        self._block_tokens = layout.block_tokens
        self._tcp_address = (peer.listen_host, 0)
        self._tcp_connections = limits.tcp_connections
        self._incoming = IncomingStreams(self._context, limits.park_s)
        self._reads = IncomingReads(self._context, limits.lease_s)
        own = Credentials(
            peer.secret, identity, host_id, arena, PeerArenas(), copier, nixl_agent, peer.tls
        )
        self._nixl_agent = nixl_agent
        self._pool = ConnectionPool(own, self._spawn)
        self._listener = PeerListener(self._context, own, self._reads, self._incoming, self._spawn)
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._fetches: dict[str, Fetch] = {}
        self._sends: dict[str, SendStream] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def start(self) -> PeerAddress:
        """Listens for peers and returns the address. Raises OSError if the TCP port is taken."""
        assert self._acceptor is None, "a messenger is started once"
        host, port = self._tcp_address
        listeners = [tcp.listen(host, port)]
        if self._nixl_agent is not None:
            listeners.append(tcp.listen(host, 0))
            self._nixl_agent.port = listeners[1].getsockname()[1]
        unix_name = ""
        if self._host_id:
            unix_name = f"moonpool-{secrets.token_hex(12)}"
            try:
                listeners.append(shm.listen(unix_name))
            except OSError as error:
                _log.warning("no shared memory with peers, only tcp: %s", error)
                unix_name = ""
        address = PeerAddress(
            instance_id=self._context.instance_id,
            host_id=self._host_id,
            unix_name=unix_name,
            tcp_host=host,
            tcp_port=listeners[0].getsockname()[1],
            nixl_port=0 if self._nixl_agent is None else self._nixl_agent.port,
        )
        self._acceptor = self._spawn("accept", lambda: self._listener.accept(listeners))
        return address

    def close(self) -> None:
        """Ends every operation (each still posts its end) and every thread, within seconds."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._listener.stop_accepting()
        if self._acceptor is not None:
            self._acceptor.join(_CLOSE_TIMEOUT_S)  # after this, no connection is accepted
        with self._lock:
            fetches, sends = list(self._fetches.values()), list(self._sends.values())
            threads = list(self._threads)
        self._reads.close(_CLOSED)
        self._incoming.close(_CLOSED)
        for fetch in fetches:
            fetch.cancel(_CLOSED)
        for stream in sends:
            stream.abort(_CLOSED)
        self._pool.close()
        self._listener.interrupt()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if self._nixl_agent is not None:
            self._nixl_agent.close()

    def counts(self) -> TransferCounts:
        return self._context.counters.counts()

    def forget_checksums(
        self, block_ids: Sequence[BlockId], first_token: int, end_token: int
    ) -> None:
        """Notes that the engine is about to write tokens first_token ... end_token - 1 of the
        sequence whose block table is `block_ids`."""
        size = self._block_tokens
        self._context.arena.checksums.forget(block_ids[first_token // size : -(-end_token // size)])

    # Methods that read a peer's cached blocks, and serve such reads

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
        gate: LayerGate | None = None,
    ) -> None:
        """Copies block `keys[i]` of the source into `block_ids[i]`. Ends with FetchEnded. With a
        `gate`, FetchProgress events precede it. Raises ValueError."""
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys but {len(block_ids)} blocks to fetch them into")

        def on_end() -> None:
            with self._lock:
                del self._fetches[fetch_id]

        fetch = Fetch(
            self._context,
            self._pool,
            WantedBlocks(fetch_id, source, keys, block_ids, _deadline_s(timeout_s)),
            self._tcp_connections if self._pool.only_tcp(source) else 1,
            gate,
            on_end,
        )
        with self._lock:
            if fetch_id in self._fetches:
                raise ValueError(f"fetch {fetch_id!r} is in progress already")
            self._fetches[fetch_id] = fetch
            if self._closing:
                fetch.cancel(_CLOSED)
        fetch.start()

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Answers ReadRequested: the first `len(block_ids)` of its keys are in these blocks, which
        stay unchanged until ReadEnded."""
        self._reads.grant(read_id, block_ids)

    def redirect_read(self, read_id: str, *addresses: PeerAddress) -> None:
        """Answers ReadRequested: other peers store the blocks, one share each."""
        self._reads.redirect(read_id, addresses)

    # Methods that send a layer stream

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        """Connects in the background; `timeout_s` limits the whole stream. Ends with SendEnded.

        Raises ValueError.
        """

        def end(event: SendEnded) -> None:
            with self._lock:
                del self._sends[stream_id]
            self._context.post(event)

        with self._lock:
            if stream_id in self._sends:
                raise ValueError(f"stream {stream_id!r} is open already")
            stream = SendStream(
                self._context,
                self._pool,
                stream_id,
                target.instance_id,
                _deadline_s(timeout_s),
                end,
            )
            self._sends[stream_id] = stream
            closing = self._closing
        if closing:
            stream.abort(_CLOSED)
        stream.start(target)

    def send(self, stream_id: str, slices: Sequence[SliceRef]) -> None:
        """Queues slices, which must not change until SendEnded. Takes microseconds; from any
        thread. Ignored if the stream has ended."""
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.send(slices)

    def finish_stream(self, stream_id: str) -> None:
        """Notes that no more slices follow. SendEnded comes when the receiver has verified all."""
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.finish()

    def abort_stream(self, stream_id: str) -> None:
        """Ends an outgoing stream early. Ignored if it has ended."""
        stream = self._sends.get(stream_id)
        if stream is not None:
            stream.abort("the stream was aborted")

    # Methods that receive a layer stream

    def expect(
        self, stream_id: str, block_ids: Sequence[BlockId], first_index: int, timeout_s: float
    ) -> None:
        """Receives index `first_index + i` of the stream into `block_ids[i]`. Ends with
        ReceiveEnded. Raises ValueError."""
        if first_index < 0:
            raise ValueError(f"first_index {first_index} is negative")
        receiver = self._context.slice_receiver(block_ids, first_index, accepts_deferred=True)
        self._incoming.expect(stream_id, receiver, _deadline_s(timeout_s))
        self._listener.wake()

    def redirect_stream(self, stream_id: str, *addresses: PeerAddress) -> None:
        """Redirects the stream's sender to these peers, which receive one share each. Holds until
        `forget_stream`."""
        self._incoming.redirect(stream_id, addresses)

    def forget_stream(self, stream_id: str) -> None:
        """Ends a redirect."""
        self._incoming.forget(stream_id)
        with self._lock:
            closing = self._closing
        if closing:
            self._incoming.cancel(stream_id, _CLOSED)

    def cancel(self, stream_id: str) -> None:
        """Ends an expected stream early. Ignored if it has ended."""
        self._incoming.cancel(stream_id, "the stream was cancelled")

    def _spawn(self, what: str, run: Callable[[], None]) -> threading.Thread:
        def tracked() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        name = f"messenger-{what}-{self._context.instance_id}"
        thread = threading.Thread(target=tracked, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return thread


def _deadline_s(timeout_s: float) -> float:
    return time.monotonic() + min(timeout_s, _MAX_TIMEOUT_S)
