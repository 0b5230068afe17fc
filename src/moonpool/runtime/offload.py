"""The messenger of an instance whose blocks lie at attention workers.

To the instance it is a messenger like any other. What concerns blocks is done by the messenger of
the attention worker that has them; peers that come here are sent there. An attention worker that is
lost is sought until it, or the one that took its place, is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from moonpool.attention.client import AttentionClient, AttentionError, Wanted, connect
from moonpool.attention.control import Cancel, Expect, Fetch, Grant, Named, Received, Told
from moonpool.attention.plan import Placement
from moonpool.attention.port import Port
from moonpool.attention.remote_ops import RemoteOps
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
from moonpool.types import BlockId, BlockKey, InstanceId, Struct
from moonpool.workers.actions import ArenaBack, ArenaLost

REDIAL_S = 0.5
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
    ) -> None:
        self._addresses = list(addresses)
        self._me = me
        self._secret = secret
        self._wanted = wanted
        self._use_shm = use_shm
        self._clients: list[AttentionClient | None] = []
        self._placement = Placement((1,))
        self._sizes: tuple[int, ...] = ()
        self._front: Messenger | None = None
        self._post: Callable[[Event], None] = lambda event: None
        self._ops: RemoteOps | None = None
        self._received: list[dict[str, int]] = [{} for _ in addresses]
        self._lock = threading.Lock()  # guards what follows
        self._streams: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._fetches: dict[str, int] = {}
        self._reads: dict[str, int] = {}
        self._epoch = 0
        self._closing = False

    def gather(self) -> Crew:
        """Connects to all. Raises AttentionError."""
        clients = []
        try:
            for address in self._addresses:
                clients.append(self._connect(address, self._wanted))
        except AttentionError:
            for client in clients:
                client.close()
            raise
        self._clients = list(clients)
        self._sizes = tuple(client.attached.num_blocks for client in clients)
        self._placement = Placement(self._sizes)
        named = [
            pair for part, client in enumerate(clients) for pair in self._global_names(part, client)
        ]
        return Crew(sizes=self._sizes, named=tuple(named))

    def make_ops(self, local: SplitOps) -> RemoteOps:
        ports = [None if client is None else client.port for client in self._clients]
        self._ops = RemoteOps(local, ports, self._placement)
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
        part, own = self._split(block_ids)
        client = self._clients[part]
        indices = tuple(range(first_index, first_index + len(own)))
        with self._lock:
            self._streams[stream_id] = part, indices
        if client is None:
            self._end_streams(part)
            return
        epoch = self._next_epoch()
        client.order(
            Expect(
                stream_id=stream_id,
                block_ids=own,
                first_index=first_index,
                timeout_s=timeout_s,
                epoch=epoch,
            )
        )
        front.expect_at(stream_id, client.attached.address)

    def cancel(self, stream_id: str) -> None:
        with self._lock:
            part = self._streams.get(stream_id, (None,))[0]
        if part is None:
            self._own_front().cancel(stream_id)
            return
        client = self._clients[part]
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
        part, own = self._split(block_ids)
        client = self._clients[part]
        with self._lock:
            self._fetches[fetch_id] = part
        if client is None:
            self._end_fetches(part)
            return
        client.order(
            Fetch(
                fetch_id=fetch_id,
                source=source,
                keys=tuple(keys),
                block_ids=own,
                timeout_s=timeout_s,
                epoch=self._next_epoch(),
            )
        )

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        with self._lock:
            part = self._reads.get(read_id)
        if part is not None:
            client = self._clients[part]
            blocks = self._placement.bounds[part], self._placement.bounds[part + 1]
            own = tuple(
                BlockId(b - int(blocks[0])) for b in block_ids if blocks[0] <= b < blocks[1]
            )
            if client is not None:
                client.order(Grant(read_id=read_id.partition(":")[2], block_ids=own))
            return
        front = self._own_front()
        holder = self._clients[self._split(block_ids)[0]] if block_ids else None
        if holder is None:
            front.grant(read_id, ())
        else:
            front.send_read_on(read_id, holder.attached.address)

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
        by_part: dict[int, list[tuple[BlockId, BlockKey]]] = {}
        for block_id, key in blocks:
            part, (own,) = self._split([block_id])
            by_part.setdefault(part, []).append((own, key))
        for part, pairs in by_part.items():
            client = self._clients[part]
            if client is not None:
                client.order(Named(blocks=tuple(pairs), epoch=epoch))

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

    def _listen(self, part: int, client: AttentionClient) -> None:
        client.listen(
            lambda told: self._on_told(part, told), lambda why: self._on_lost(part, client, why)
        )

    def _on_told(self, part: int, told: Told) -> None:
        match told:
            case Received():
                self._received[part] = told.num_bytes
            case ReceiveEnded():
                with self._lock:
                    known = self._streams.pop(told.stream_id, None)
                self._own_front().forget_stream(told.stream_id)
                if known is not None:
                    self._post(told)
            case FetchEnded():
                with self._lock:
                    known_part = self._fetches.pop(told.fetch_id, None)
                if known_part is not None:
                    self._post(told)
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
            start = int(self._placement.bounds[part])
            corrupt = tuple(BlockId(b + start) for b in told.corrupt)
            self._post(ReadEnded(read_id=read_id, corrupt=corrupt, error=told.error))

    def _drop(self, part: int, port: Port) -> None:
        """A step found out that the worker is of no use any more."""
        client = self._clients[part]
        if client is not None and client.port is port:
            client.close()

    def _on_lost(self, part: int, client: AttentionClient, why: str) -> None:
        """In the listener's thread, which then seeks the worker until it is back."""
        with self._lock:
            if self._closing or self._clients[part] is not client:
                return
            self._clients[part] = None
        name = self._addresses[part].instance_id
        log.warning("attention worker %s is lost: %s", name, why)
        self._post(ArenaLost(part, f"attention worker {name} is lost"))
        self._end_streams(part)
        self._end_fetches(part)
        with self._lock:
            reads = [read_id for read_id, where in self._reads.items() if where == part]
            for read_id in reads:
                del self._reads[read_id]
        for read_id in reads:
            self._post(ReadEnded(read_id=read_id, error="the attention worker is lost"))
        self._seek(part)

    def _end_streams(self, part: int) -> None:
        with self._lock:
            ended = {s: v[1] for s, v in self._streams.items() if v[0] == part}
            for stream_id in ended:
                del self._streams[stream_id]
        for stream_id, indices in ended.items():
            self._own_front().forget_stream(stream_id)
            error = "the attention worker is lost"
            self._post(ReceiveEnded(stream_id=stream_id, corrupt=indices, error=error))

    def _end_fetches(self, part: int) -> None:
        with self._lock:
            ended = [f for f, where in self._fetches.items() if where == part]
            for fetch_id in ended:
                del self._fetches[fetch_id]
        for fetch_id in ended:
            error = "the attention worker is lost"
            self._post(FetchEnded(fetch_id=fetch_id, num_blocks=0, error=error))

    def _seek(self, part: int) -> None:
        wanted = msgspec.structs.replace(self._wanted, num_blocks=self._sizes[part])
        while not self._closing:
            address = self._addresses[part]
            try:
                client = self._connect(address, wanted)
            except AttentionError as error:
                log.info("still without its attention worker: %s", error)
                time.sleep(REDIAL_S)
                continue
            assert self._ops is not None
            with self._lock:
                if self._closing:
                    client.close()
                    return
                self._clients[part] = client
            self._ops.replace(part, client.port)
            log.info("attention worker %s is there", address.instance_id)
            self._post(ArenaBack(part, self._global_names(part, client)))
            self._listen(part, client)
            return

    # Numbers

    def _connect(self, address: PeerAddress, wanted: Wanted) -> AttentionClient:
        return connect(address, self._me, self._secret, wanted, self._use_shm)

    def _global_names(
        self, part: int, client: AttentionClient
    ) -> tuple[tuple[BlockId, BlockKey], ...]:
        start = int(self._placement.bounds[part])
        return tuple((BlockId(b + start), key) for b, key in client.attached.named)

    def _split(self, block_ids: Sequence[BlockId]) -> tuple[int, tuple[BlockId, ...]]:
        """The attention worker that has the blocks, and what it calls them."""
        part = int(self._placement.owners(block_ids[0]))  # type: ignore[arg-type]
        start, end = (int(b) for b in self._placement.bounds[part : part + 2])
        assert all(start <= b < end for b in block_ids), "a sequence lies at one attention worker"
        return part, tuple(BlockId(b - start) for b in block_ids)

    def _next_epoch(self) -> int:
        with self._lock:
            self._epoch += 1
            return self._epoch

    def _own_front(self) -> Messenger:
        assert self._front is not None, "nothing is asked before `run`"
        return self._front
