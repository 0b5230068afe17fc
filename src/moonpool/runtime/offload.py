"""The messenger of an instance whose blocks lie at attention workers.

To the instance it is a messenger like any other. What concerns blocks is done by the messenger of
the attention worker that has them; peers that come here are sent there. An attention worker that is
lost is sought until it, or the one that took its place, is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from moonpool.attention.client import AttentionClient, AttentionError, Wanted, connect
from moonpool.attention.control import Cancel, Expect, Fetch, Grant, Named, Received, Told
from moonpool.attention.home import HomeClient
from moonpool.attention.partition import HeadRange, Partition
from moonpool.attention.port import Port
from moonpool.attention.remote_ops import Home, RemoteOps
from moonpool.engine.ops import SplitOps
from moonpool.kvcache.transfers import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
)
from moonpool.messenger.counters import TransferCounts
from moonpool.messenger.messenger import Messenger
from moonpool.messenger.send_stream import SliceRef
from moonpool.runtime.gathering import Gathering, Part
from moonpool.types import BlockId, BlockKey, InstanceId, Struct
from moonpool.workers.actions import ArenaBack, ArenaLost

REDIAL_S = 0.5
LOST = "the attention worker is lost"
Event = MessengerEvent | ArenaLost | ArenaBack

log = logging.getLogger("moonpool.worker")


class Crew(Struct, frozen=True):
    """The attention workers of one instance, as they were found at its start."""

    sizes: tuple[int, ...]
    named: tuple[tuple[BlockId, BlockKey], ...]


class Offload:
    """Connected by `gather`; `run` begins to hear events. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[PeerAddress],
        me: InstanceId,
        secret: bytes,
        wanted: Wanted,
        use_shm: bool,
        head_ranges: Sequence[HeadRange] = (),
    ) -> None:
        """`head_ranges`: of each worker, if they share the blocks out by head."""
        self._addresses = list(addresses)
        self._me = me
        self._secret = secret
        self._wanted = wanted
        self._use_shm = use_shm
        self._clients: list[AttentionClient | HomeClient | None] = []
        self._home: Home | None = None
        self._own_sizes: list[int] = []  # blocks of each
        self._head_ranges = tuple(head_ranges)
        self._partition = Partition((1,))
        self._front: Messenger | None = None
        self._post: Callable[[Event], None] = lambda event: None
        self._ops: RemoteOps | None = None
        self._received: list[dict[str, int]] = []
        self._lock = threading.Lock()  # guards what follows
        self._streams: dict[str, Gathering] = {}
        self._fetches: dict[str, Gathering] = {}
        self._lost: set[int] = set()  # arenas
        self._reads: dict[str, int] = {}
        self._epoch = 0
        self._closing = False

    def gather(self, home: HomeClient | None = None) -> Crew:
        """Connects to all; what is kept at `home` comes after them. Raises AttentionError."""
        clients: list[AttentionClient | HomeClient] = []
        try:
            for worker, address in enumerate(self._addresses):
                clients.append(self._connect(address, self._wanted_of(worker)))
        except AttentionError:
            for client in (*clients, *([] if home is None else [home])):
                client.close()
            raise
        if home is not None:
            self._home = Home(len(clients), home.hand)
            clients.append(home)
        self._received = [{} for _ in clients]
        self._clients = list(clients)
        self._own_sizes = [client.attached.num_blocks for client in clients]
        self._partition = Partition(self._own_sizes, self._head_ranges)
        sizes = self._partition.sizes
        named = [pair for arena in range(len(sizes)) for pair in self._names_in(arena)]
        return Crew(sizes=sizes, named=tuple(named))

    def make_ops(self, local: SplitOps) -> RemoteOps:
        ports = [c.port for c in self._clients if isinstance(c, AttentionClient)]
        placement, ranges = self._partition.placement, self._head_ranges
        self._ops = RemoteOps(local, ports, placement, head_ranges=ranges, home=self._home)
        self._ops.on_lost = self._drop
        return self._ops

    def run(self, front: Messenger, post: Callable[[Event], None]) -> None:
        """`front` is where peers come first."""
        self._front, self._post = front, post
        for part, client in enumerate(self._clients):
            if client is not None:
                self._listen(part, client)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the attention workers, by their places."""
        return tuple(address.instance_id for address in self._addresses)

    def move(self, part: int, address: PeerAddress) -> None:
        """Another worker has that place now."""
        self._addresses[part] = address

    # What a messenger does

    def expect(
        self, stream_id: str, block_ids: Sequence[BlockId], first_index: int, timeout_s: float
    ) -> None:
        front = self._own_front()
        if not block_ids:  # all of it is cached
            front.expect(stream_id, block_ids, first_index, timeout_s)
            return
        shares = self._partition.shares(block_ids)
        gathering = Gathering(
            {
                str(worker): Part(worker, [first_index + i for i, b in enumerate(own) if b >= 0])
                for worker, own in shares.items()
            }
        )
        with self._lock:
            self._streams[stream_id] = gathering
        clients = self._clients_of(shares)
        if len(clients) < len(shares):
            for worker in shares:
                self._end_streams(worker, stream_id)
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
            client.order(expect)
        front.expect_at(stream_id, *(client.attached.address for client in clients))

    def cancel(self, stream_id: str) -> None:
        with self._lock:
            gathering = self._streams.get(stream_id)
            workers = [] if gathering is None else gathering.workers
        if gathering is None:
            self._own_front().cancel(stream_id)
        for worker in workers:
            client = self._clients[worker]
            if client is not None:
                client.order(Cancel(stream_id=stream_id))

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
    ) -> None:
        runs = self._partition.runs(block_ids)
        gathering = Gathering(
            {
                f"{number}/{fetch_id}": Part(worker, [first + i for i in range(len(own))])
                for number, (worker, first, own) in enumerate(runs)
            }
        )
        with self._lock:
            self._fetches[fetch_id] = gathering
        workers = [worker for worker, _, _ in runs]
        clients = self._clients_of(workers)
        if len(clients) < len(runs):
            for worker in workers:
                self._end_fetches(worker, fetch_id)
            return
        epoch = self._next_epoch()
        for number, (client, (_, first, own)) in enumerate(zip(clients, runs, strict=True)):
            fetch = Fetch(
                fetch_id=f"{number}/{fetch_id}",
                source=source,
                keys=tuple(keys[first : first + len(own)]),
                block_ids=own,
                timeout_s=timeout_s,
                epoch=epoch,
            )
            client.order(fetch)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        with self._lock:
            part = self._reads.get(read_id)
        if part is not None:
            client = self._clients[part]
            if client is not None:
                own = self._partition.own(part, block_ids)
                client.order(Grant(read_id=read_id.partition(":")[2], block_ids=own))
            return
        front = self._own_front()
        workers = [*self._partition.shares(block_ids)] if block_ids else []
        clients = self._clients_of(workers)
        if not clients or len(clients) < len(workers):
            front.grant(read_id, ())
        else:
            front.send_read_on(read_id, *(client.attached.address for client in clients))

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None:
        raise ValueError("an instance whose blocks lie at attention workers hands no prefill over")

    def send(self, stream_id: str, slices: Sequence[SliceRef]) -> None:
        raise ValueError("an instance whose blocks lie at attention workers hands no prefill over")

    def finish_stream(self, stream_id: str) -> None:
        """None was ever opened."""

    def abort_stream(self, stream_id: str) -> None:
        """None was ever opened."""

    def forget_sums(self, block_ids: Sequence[BlockId], first_token: int, end_token: int) -> None:
        """Called for each share of a step before it: its writes come after all named so far. The
        sums are with the blocks, and forgotten there."""
        assert self._ops is not None
        self._ops.epoch = self._next_epoch()

    def name(self, blocks: Sequence[tuple[BlockId, BlockKey]]) -> None:
        """These blocks are complete: whoever is our successor may use them."""
        epoch = self._next_epoch()
        if not blocks:
            return
        keys = [key for _, key in blocks]
        for worker, own in self._partition.shares([block_id for block_id, _ in blocks]).items():
            pairs = tuple((b, key) for b, key in zip(own, keys, strict=True) if b >= 0)
            client = self._clients[worker]
            if client is not None:
                client.order(Named(blocks=pairs, epoch=epoch))

    def counts(self) -> TransferCounts:
        counts = self._own_front().counts()
        for received in self._received:
            for transport, num_bytes in received.items():
                before = counts.received_bytes.get(transport, 0)
                counts.received_bytes[transport] = before + num_bytes
        return counts

    def close(self) -> None:
        with self._lock:
            self._closing = True
        for client in self._clients:
            if client is not None:
                client.close()
        if self._front is not None:
            self._front.close()

    # Events of the attention workers

    def _listen(self, part: int, client: AttentionClient | HomeClient) -> None:
        client.listen(
            lambda told: self._on_told(part, told), lambda why: self._on_lost(part, client, why)
        )

    def _on_told(self, part: int, told: Told) -> None:
        match told:
            case Received():
                self._received[part] = told.num_bytes
            case ReceiveEnded():
                self._on_received(part, told)
            case FetchEnded():
                self._on_fetched(told)
            case ReadRequested():
                read_id = f"{part}:{told.read_id}"
                with self._lock:
                    self._reads[read_id] = part
                self._post(ReadRequested(read_id=read_id, keys=told.keys))
            case ReadEnded():
                self._end_read(part, told)

    def _end_read(self, part: int, told: ReadEnded) -> None:
        read_id = f"{part}:{told.read_id}"
        with self._lock:
            known = self._reads.pop(read_id, None)
        if known is not None:
            corrupt = tuple(self._partition.whole(part, b) for b in told.corrupt)
            self._post(ReadEnded(read_id=read_id, corrupt=corrupt, error=told.error))

    def _drop(self, part: int, port: Port) -> None:
        """A step found out that the worker is of no use any more."""
        client = self._clients[part]
        if isinstance(client, AttentionClient) and client.port is port:
            client.close()

    def _on_lost(self, part: int, client: AttentionClient | HomeClient, why: str) -> None:
        """In the listener's thread, which then seeks the worker until it is back. All workers of an
        arena are left with one of them: nothing that is under way must be written later."""
        with self._lock:
            if self._closing:
                return
            arena = self._partition.arena_of(part)
            is_news = self._clients[part] is client
            fellows = self._clients_of(self._partition.workers_of(arena)) if is_news else []
            if is_news:
                self._lost.add(arena)
                for worker in self._partition.workers_of(arena):
                    self._clients[worker] = None
        for fellow in fellows:
            fellow.close()
        if is_news:
            text = f"attention worker {self._addresses[part].instance_id} is lost"
            log.warning("%s: %s", text, why)
            self._post(ArenaLost(arena, text))
            for worker in self._partition.workers_of(arena):
                self._end_operations(worker)
        self._seek(part)

    def _end_operations(self, worker: int) -> None:
        self._end_streams(worker)
        self._end_fetches(worker)
        with self._lock:
            reads = [read_id for read_id, where in self._reads.items() if where == worker]
            for read_id in reads:
                del self._reads[read_id]
        for read_id in reads:
            self._post(ReadEnded(read_id=read_id, error=LOST))

    def _on_received(self, worker: int, told: ReceiveEnded) -> None:
        """A worker's share of a stream has ended; the last one ends the stream."""
        with self._lock:
            gathering = self._streams.get(told.stream_id)
            if gathering is None:
                return
            gathering.count(told.num_bytes, told.seconds)
            if not gathering.end(str(worker), told.corrupt, told.error):
                return
            del self._streams[told.stream_id]
        self._tell_received(told.stream_id, gathering)

    def _tell_received(self, stream_id: str, gathering: Gathering) -> None:
        self._own_front().forget_stream(stream_id)
        self._post(
            ReceiveEnded(
                stream_id=stream_id,
                corrupt=gathering.missing,
                num_bytes=gathering.num_bytes,
                seconds=gathering.seconds,
                error=gathering.error,
            )
        )

    def _end_streams(self, worker: int, only: str = "") -> None:
        with self._lock:
            mine = [(s, g) for s, g in self._streams.items() if only in ("", s)]
            ended = [(stream_id, g) for stream_id, g in mine if g.lose(worker)]
            for stream_id, _ in ended:
                del self._streams[stream_id]
        for stream_id, gathering in ended:
            self._tell_received(stream_id, gathering)

    def _on_fetched(self, told: FetchEnded) -> None:
        fetch_id = told.fetch_id.partition("/")[2]
        with self._lock:
            gathering = self._fetches.get(fetch_id)
            if gathering is None:
                return
            missing = gathering.indices_of(told.fetch_id)[told.num_blocks :]
            gathering.count(told.num_bytes, told.seconds, told.corrupt_slices)
            if not gathering.end(told.fetch_id, missing, told.error):
                return
            del self._fetches[fetch_id]
        self._tell_fetched(fetch_id, gathering)

    def _tell_fetched(self, fetch_id: str, gathering: Gathering) -> None:
        self._post(
            FetchEnded(
                fetch_id=fetch_id,
                num_blocks=gathering.num_whole,
                corrupt_slices=gathering.corrupt_slices,
                num_bytes=gathering.num_bytes,
                seconds=gathering.seconds,
                error=gathering.error,
            )
        )

    def _end_fetches(self, worker: int, only: str = "") -> None:
        with self._lock:
            mine = [(f, g) for f, g in self._fetches.items() if only in ("", f)]
            ended = [(fetch_id, g) for fetch_id, g in mine if g.lose(worker)]
            for fetch_id, _ in ended:
                del self._fetches[fetch_id]
        for fetch_id, gathering in ended:
            self._tell_fetched(fetch_id, gathering)

    def _seek(self, part: int) -> None:
        while not self._closing:
            address = self._addresses[part]
            wanted = msgspec.structs.replace(
                self._wanted_of(part), num_blocks=self._own_sizes[part]
            )
            try:
                client = self._connect(address, wanted)
            except AttentionError as error:
                log.info("still without its attention worker: %s", error)
                time.sleep(REDIAL_S)
                continue
            log.info("attention worker %s is there", address.instance_id)
            self._welcome(part, client)
            return

    def _welcome(self, part: int, client: AttentionClient) -> None:
        """An arena is back when all workers of it are."""
        assert self._ops is not None
        arena = self._partition.arena_of(part)
        with self._lock:
            if self._closing:
                client.close()
                return
            self._clients[part] = client
            self._ops.replace(part, client.port)
            whole = all(self._clients[w] is not None for w in self._partition.workers_of(arena))
            named = self._names_in(arena) if whole and arena in self._lost else None
            if named is not None:
                self._lost.discard(arena)
        if named is not None:
            self._post(ArenaBack(arena, named))
        self._listen(part, client)

    # Numbers

    def arena_of(self, worker: int) -> int:
        """The arena that is lost with an attention worker."""
        return self._partition.arena_of(worker)

    def _clients_of(self, workers: Iterable[int]) -> list[AttentionClient | HomeClient]:
        """Fewer than were asked for if one is lost."""
        clients = [self._clients[worker] for worker in workers]
        return [client for client in clients if client is not None]

    def _connect(self, address: PeerAddress, wanted: Wanted) -> AttentionClient:
        return connect(address, self._me, self._secret, wanted, self._use_shm)

    def _wanted_of(self, worker: int) -> Wanted:
        """By head, the memory of as many whole blocks holds more of a few heads each."""
        if not self._head_ranges:
            return self._wanted
        wanted, heads = self._wanted, self._head_ranges[worker]
        num_blocks = wanted.num_blocks * wanted.layout.num_kv_heads // heads.count
        return msgspec.structs.replace(wanted, kv_heads=heads, num_blocks=num_blocks)

    def _names_in(self, arena: int) -> tuple[tuple[BlockId, BlockKey], ...]:
        """What was complete in it when its workers were found, at all of them."""
        found: list[dict[BlockId, BlockKey]] = []
        for worker in self._partition.workers_of(arena):
            client = self._clients[worker]
            assert client is not None
            found.append({self._partition.whole(worker, b): k for b, k in client.attached.named})
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

    def _own_front(self) -> Messenger:
        assert self._front is not None, "nothing is asked before `run`"
        return self._front
