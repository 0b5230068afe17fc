"""The messenger of an instance whose blocks are at attention workers.

To the instance it is a messenger like any other. The messenger of the attention worker that has the
blocks performs each operation on them; peers that connect here are redirected there. After an
attention worker is lost, its listener thread reconnects until the worker, or the one that took its
place, is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from moonpool.protocol.transfer_events import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
)
from moonpool.scheduler.actions import ArenaBack, ArenaLost
from moonpool.types import BlockId, BlockKey, Struct
from moonpool_engine.attention_offload.channel import AttentionChannel
from moonpool_engine.attention_offload.client import (
    AttachOptions,
    AttentionClient,
    AttentionError,
    LocalAttentionWorker,
    connect,
)
from moonpool_engine.attention_offload.fan_in import FanIn, FanInPart
from moonpool_engine.attention_offload.partition import Partition
from moonpool_engine.attention_offload.remote_ops import LocalPartition, RemoteOps
from moonpool_engine.attention_offload.wire import (
    AttentionEvent,
    Cancel,
    Expect,
    FetchPrefix,
    Grant,
    KvHeadRange,
    MarkCached,
    ReceivedBytes,
)
from moonpool_engine.engine.ops import SplitOps
from moonpool_engine.transfer.context import SliceRef
from moonpool_engine.transfer.counters import TransferCounts
from moonpool_engine.transfer.gate import LayerGate
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger

RECONNECT_S = 0.5
WORKER_LOST = "the attention worker is lost"
Event = MessengerEvent | ArenaLost | ArenaBack

log = logging.getLogger("moonpool.worker")


class AttentionGroup(Struct, frozen=True):
    """The memory of one instance's attention workers, as found at its start."""

    sizes: tuple[int, ...]  # number of blocks of each arena
    cached: tuple[tuple[BlockId, BlockKey], ...]  # full blocks that an earlier owner has left


class RemoteAttentionMessenger:
    """A `BlockMessenger` over connections to the attention workers. Thread-safe. Call `connect`,
    `make_ops`, then `run`, which begins to receive events."""

    def __init__(
        self,
        addresses: Sequence[PeerAddress],
        peer: LocalPeer,
        options: AttachOptions,
        head_ranges: Sequence[KvHeadRange] = (),
    ) -> None:
        """`head_ranges`: the heads of each worker, if blocks are divided by head."""
        self._addresses = list(addresses)
        self._peer = peer
        self._options = options
        self._clients: list[AttentionClient | LocalAttentionWorker | None] = []
        self._local: LocalPartition | None = None
        self._worker_sizes: list[int] = []  # number of blocks of each worker
        self._head_ranges = tuple(head_ranges)
        self._partition = Partition((1,))
        self._front: Messenger | None = None
        self._post: Callable[[Event], None] = lambda event: None
        self._ops: RemoteOps | None = None
        self._received: list[dict[str, int]] = []
        self._lock = threading.Lock()  # guards the fields below
        self._streams: dict[str, FanIn] = {}
        self._fetches: dict[str, FanIn] = {}
        self._lost: set[int] = set()  # arenas
        self._reads: dict[str, int] = {}  # the worker that serves each peer's read
        self._epoch = 0
        self._closing = False

    def connect(self, local: LocalAttentionWorker | None = None) -> AttentionGroup:
        """Connects to all workers; the `local` worker comes after the others. Raises
        AttentionError."""
        clients: list[AttentionClient | LocalAttentionWorker] = []
        try:
            for worker, address in enumerate(self._addresses):
                clients.append(self._connect(address, self._options_of(worker)))
        except AttentionError:
            for client in (*clients, *([] if local is None else [local])):
                client.close()
            raise
        if local is not None:
            self._local = LocalPartition(len(clients), local.executor)
            clients.append(local)
        self._received = [{} for _ in clients]
        self._clients = list(clients)
        self._worker_sizes = [client.attached.num_blocks for client in clients]
        self._partition = Partition(self._worker_sizes, self._head_ranges)
        sizes = self._partition.sizes
        cached = [pair for arena in range(len(sizes)) for pair in self._cached_in(arena)]
        return AttentionGroup(sizes=sizes, cached=tuple(cached))

    def make_ops(self, local: SplitOps) -> RemoteOps:
        """Makes the `Ops` of the engine; `local` computes what is not attention."""
        channels = [c.channel for c in self._clients if isinstance(c, AttentionClient)]
        placement, ranges = self._partition.placement, self._head_ranges
        self._ops = RemoteOps(
            local, channels, placement, head_ranges=ranges, local_partition=self._local
        )
        self._ops.on_lost = self._drop
        return self._ops

    def run(self, front: Messenger, post: Callable[[Event], None]) -> None:
        """Starts to receive events. `front` is the messenger that peers connect to first; `post`
        gets the events."""
        self._front, self._post = front, post
        for worker, client in enumerate(self._clients):
            if client is not None:
                self._listen(worker, client)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attention workers, by place."""
        return tuple(address.instance_id for address in self._addresses)

    def move(self, worker: int, address: PeerAddress) -> None:
        """Another worker has this place now; takes effect with the next reconnection."""
        self._addresses[worker] = address

    # Methods of `BlockMessenger`

    def expect(
        self, stream_id: str, block_ids: Sequence[BlockId], first_index: int, timeout_s: float
    ) -> None:
        front = self._front_messenger()
        if not block_ids:  # the whole prompt is cached, so no block follows
            front.expect(stream_id, block_ids, first_index, timeout_s)
            return
        shares = self._partition.shares(block_ids)
        fan_in = FanIn(
            {
                str(worker): FanInPart(
                    worker, [first_index + i for i, b in enumerate(own) if b >= 0]
                )
                for worker, own in shares.items()
            }
        )
        with self._lock:
            self._streams[stream_id] = fan_in
        clients = self._clients_of(shares)
        if len(clients) < len(shares):
            for worker in shares:
                self._end_parts(self._streams, self._report_received, worker, stream_id)
            return
        epoch = self._next_epoch()
        for client, own in zip(clients, shares.values(), strict=True):
            expect = Expect(
                stream_id=stream_id,
                block_ids=own,
                first_index=first_index,
                timeout_s=timeout_s,
                epoch=epoch,
            )
            client.command(expect)
        front.redirect_stream(stream_id, *(client.attached.address for client in clients))

    def cancel(self, stream_id: str) -> None:
        with self._lock:
            fan_in = self._streams.get(stream_id)
            workers = [] if fan_in is None else fan_in.workers
        if fan_in is None:
            self._front_messenger().cancel(stream_id)
        for worker in workers:
            client = self._clients[worker]
            if client is not None:
                client.command(Cancel(stream_id=stream_id))

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
        gate: LayerGate | None = None,
    ) -> None:
        """Nobody waits at the `gate`: a step never waits for single layers of blocks that lie at
        attention workers."""
        runs = self._partition.runs(block_ids)
        fan_in = FanIn(
            {
                f"{number}/{fetch_id}": FanInPart(worker, [first + i for i in range(len(own))])
                for number, (worker, first, own) in enumerate(runs)
            }
        )
        with self._lock:
            self._fetches[fetch_id] = fan_in
        workers = [worker for worker, _, _ in runs]
        clients = self._clients_of(workers)
        if len(clients) < len(runs):
            for worker in workers:
                self._end_parts(self._fetches, self._report_fetched, worker, fetch_id)
            return
        epoch = self._next_epoch()
        for number, (client, (_, first, own)) in enumerate(zip(clients, runs, strict=True)):
            fetch = FetchPrefix(
                fetch_id=f"{number}/{fetch_id}",
                source=source,
                keys=tuple(keys[first : first + len(own)]),
                block_ids=own,
                timeout_s=timeout_s,
                epoch=epoch,
            )
            client.command(fetch)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        with self._lock:
            worker = self._reads.get(read_id)
        if worker is not None:
            client = self._clients[worker]
            if client is not None:
                own = self._partition.own(worker, block_ids)
                client.command(Grant(read_id=read_id.partition(":")[2], block_ids=own))
            return
        front = self._front_messenger()
        workers = [*self._partition.shares(block_ids)] if block_ids else []
        clients = self._clients_of(workers)
        if not clients or len(clients) < len(workers):
            front.grant(read_id, ())
        else:
            front.redirect_read(read_id, *(client.attached.address for client in clients))

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        """Raises ValueError: an instance with attention workers sends no prefill's KVCache."""
        raise ValueError("an instance with attention workers cannot send a prefill's KVCache")

    def send(self, stream_id: str, slices: Sequence[SliceRef]) -> None:
        """Raises ValueError: no stream can be opened."""
        raise ValueError("an instance with attention workers cannot send a prefill's KVCache")

    def finish_stream(self, stream_id: str) -> None:
        """Does nothing: no stream can be opened."""

    def abort_stream(self, stream_id: str) -> None:
        """Does nothing: no stream can be opened."""

    def forget_checksums(
        self, block_ids: Sequence[BlockId], first_token: int, end_token: int
    ) -> None:
        """Called for each share of a step before the step begins: gives the step's writes a newer
        epoch than any key sent so far. The attention workers keep the checksums, and drop them
        themselves."""
        assert self._ops is not None
        self._ops.epoch = self._next_epoch()

    def name(self, blocks: Sequence[tuple[BlockId, BlockKey]]) -> None:
        """Gives these full blocks their keys, so that a successor of this instance can reuse
        them."""
        epoch = self._next_epoch()
        if not blocks:
            return
        keys = [key for _, key in blocks]
        for worker, own in self._partition.shares([block_id for block_id, _ in blocks]).items():
            pairs = tuple((b, key) for b, key in zip(own, keys, strict=True) if b >= 0)
            client = self._clients[worker]
            if client is not None:
                client.command(MarkCached(blocks=pairs, epoch=epoch))

    def counts(self) -> TransferCounts:
        """Transfer counts of this process and of all attention workers."""
        counts = self._front_messenger().counts()
        for received in self._received:
            for transport, num_bytes in received.items():
                before = counts.received_bytes.get(transport, 0)
                counts.received_bytes[transport] = before + num_bytes
        return counts

    def close(self) -> None:
        """Disconnects from all workers and closes the front messenger."""
        with self._lock:
            self._closing = True
        for client in self._clients:
            if client is not None:
                client.close()
        if self._front is not None:
            self._front.close()

    # Events of the attention workers

    def _listen(self, worker: int, client: AttentionClient | LocalAttentionWorker) -> None:
        client.listen(
            lambda event: self._on_event(worker, event),
            lambda why: self._on_lost(worker, client, why),
        )

    def _on_event(self, worker: int, event: AttentionEvent) -> None:
        match event:
            case ReceivedBytes():
                self._received[worker] = event.num_bytes
            case ReceiveEnded():
                self._on_received(worker, event)
            case FetchEnded():
                self._on_fetched(event)
            case ReadRequested():
                read_id = f"{worker}:{event.read_id}"
                with self._lock:
                    self._reads[read_id] = worker
                self._post(ReadRequested(read_id=read_id, keys=event.keys))
            case ReadEnded():
                self._end_read(worker, event)

    def _end_read(self, worker: int, event: ReadEnded) -> None:
        read_id = f"{worker}:{event.read_id}"
        with self._lock:
            known = self._reads.pop(read_id, None)
        if known is not None:
            corrupt = tuple(self._partition.whole(worker, b) for b in event.corrupt)
            self._post(ReadEnded(read_id=read_id, corrupt=corrupt, error=event.error))

    def _drop(self, worker: int, channel: AttentionChannel) -> None:
        """Called when a step finds that the worker has failed: ends the connection."""
        client = self._clients[worker]
        if isinstance(client, AttentionClient) and client.channel is channel:
            client.close()

    def _on_lost(
        self, worker: int, client: AttentionClient | LocalAttentionWorker, why: str
    ) -> None:
        """Runs in the listener's thread, which then reconnects. Handles the loss of one worker: all
        workers of its arena are disconnected, so that no operation under way can write to it
        later."""
        with self._lock:
            if self._closing:
                return
            arena = self._partition.arena_of(worker)
            was_connected = self._clients[worker] is client
            group = self._clients_of(self._partition.workers_of(arena)) if was_connected else []
            if was_connected:
                self._lost.add(arena)
                for member in self._partition.workers_of(arena):
                    self._clients[member] = None
        for other in group:
            other.close()
        if was_connected:
            text = f"attention worker {self._addresses[worker].instance_id} is lost"
            log.warning("%s: %s", text, why)
            self._post(ArenaLost(arena, text))
            for member in self._partition.workers_of(arena):
                self._end_operations(member)
        self._reconnect(worker)

    def _end_operations(self, worker: int) -> None:
        self._end_parts(self._streams, self._report_received, worker)
        self._end_parts(self._fetches, self._report_fetched, worker)
        with self._lock:
            reads = [read_id for read_id, where in self._reads.items() if where == worker]
            for read_id in reads:
                del self._reads[read_id]
        for read_id in reads:
            self._post(ReadEnded(read_id=read_id, error=WORKER_LOST))

    def _on_received(self, worker: int, event: ReceiveEnded) -> None:
        """A worker's part of a stream has ended; the last part ends the stream."""
        with self._lock:
            fan_in = self._streams.get(event.stream_id)
            if fan_in is None:
                return
            fan_in.count(event.num_bytes, event.seconds, event.corrupt_slices)
            if not fan_in.end(str(worker), event.incomplete, event.error):
                return
            del self._streams[event.stream_id]
        self._report_received(event.stream_id, fan_in)

    def _report_received(self, stream_id: str, fan_in: FanIn) -> None:
        self._front_messenger().forget_stream(stream_id)
        self._post(
            ReceiveEnded(
                stream_id=stream_id,
                incomplete=fan_in.missing,
                corrupt_slices=fan_in.corrupt_slices,
                num_bytes=fan_in.num_bytes,
                seconds=fan_in.seconds,
                error=fan_in.error,
            )
        )

    def _end_parts(
        self,
        operations: dict[str, FanIn],
        report: Callable[[str, FanIn], None],
        worker: int,
        only: str = "",
    ) -> None:
        """Ends the parts of a lost worker, in all operations or in one, and reports the operations
        that end with them."""
        with self._lock:
            mine = [(name, f) for name, f in operations.items() if only in ("", name)]
            ended = [(name, f) for name, f in mine if f.lose(worker)]
            for name, _ in ended:
                del operations[name]
        for name, fan_in in ended:
            report(name, fan_in)

    def _on_fetched(self, event: FetchEnded) -> None:
        fetch_id = event.fetch_id.partition("/")[2]
        with self._lock:
            fan_in = self._fetches.get(fetch_id)
            if fan_in is None:
                return
            missing = fan_in.indices_of(event.fetch_id)[event.num_blocks :]
            fan_in.count(event.num_bytes, event.seconds, event.corrupt_slices)
            if not fan_in.end(event.fetch_id, missing, event.error):
                return
            del self._fetches[fetch_id]
        self._report_fetched(fetch_id, fan_in)

    def _report_fetched(self, fetch_id: str, fan_in: FanIn) -> None:
        self._post(
            FetchEnded(
                fetch_id=fetch_id,
                num_blocks=fan_in.num_whole,
                corrupt_slices=fan_in.corrupt_slices,
                num_bytes=fan_in.num_bytes,
                seconds=fan_in.seconds,
                error=fan_in.error,
            )
        )

    def _reconnect(self, worker: int) -> None:
        while not self._closing:
            address = self._addresses[worker]
            options = msgspec.structs.replace(
                self._options_of(worker), num_blocks=self._worker_sizes[worker]
            )
            try:
                client = self._connect(address, options)
            except AttentionError as error:
                log.info("cannot reconnect to an attention worker yet: %s", error)
                time.sleep(RECONNECT_S)
                continue
            log.info("reconnected to attention worker %s", address.instance_id)
            self._on_reconnected(worker, client)
            return

    def _on_reconnected(self, worker: int, client: AttentionClient) -> None:
        """Enters the new connection. An arena is back once all its workers are."""
        assert self._ops is not None
        arena = self._partition.arena_of(worker)
        with self._lock:
            if self._closing:
                client.close()
                return
            self._clients[worker] = client
            self._ops.replace(worker, client.channel)
            complete = all(self._clients[w] is not None for w in self._partition.workers_of(arena))
            cached = self._cached_in(arena) if complete and arena in self._lost else None
            if cached is not None:
                self._lost.discard(arena)
        if cached is not None:
            self._post(ArenaBack(arena, cached))
        self._listen(worker, client)

    # Workers and arenas

    def _clients_of(self, workers: Iterable[int]) -> list[AttentionClient | LocalAttentionWorker]:
        """Returns the clients of these workers, without lost ones."""
        clients = [self._clients[worker] for worker in workers]
        return [client for client in clients if client is not None]

    def _connect(self, address: PeerAddress, options: AttachOptions) -> AttentionClient:
        me = self._peer
        return connect(address, me.instance_id, me.secret, options, me.use_shared_memory, me.tls)

    def _options_of(self, worker: int) -> AttachOptions:
        """Returns a worker's options. If blocks are divided by head, its memory holds more blocks,
        each with fewer heads."""
        if not self._head_ranges:
            return self._options
        options, heads = self._options, self._head_ranges[worker]
        num_blocks = options.num_blocks * options.layout.num_kv_heads // heads.count
        return msgspec.structs.replace(options, kv_heads=heads, num_blocks=num_blocks)

    def _cached_in(self, arena: int) -> tuple[tuple[BlockId, BlockKey], ...]:
        """Blocks of the arena that were cached at all its workers when they attached."""
        found: list[dict[BlockId, BlockKey]] = []
        for worker in self._partition.workers_of(arena):
            client = self._clients[worker]
            assert client is not None
            found.append({self._partition.whole(worker, b): k for b, k in client.attached.cached})
        first, *others = found
        end = int(self._partition.placement.bounds[arena + 1])
        return tuple(
            (block_id, key)
            for block_id, key in first.items()
            if block_id < end and all(other.get(block_id) == key for other in others)
        )

    def _next_epoch(self) -> int:
        with self._lock:
            self._epoch += 1
            return self._epoch

    def _front_messenger(self) -> Messenger:
        assert self._front is not None, "call `run` first"
        return self._front
