"""What a prefill waits for: blocks of its prefix that lie elsewhere than in this instance's DRAM.

They come from the instance's SSD, where reading them is worth it, and what follows from the peer
that the Conductor named; both at the same time. A peer's read of blocks on this instance's SSD is
answered when they are in DRAM. Whatever does not arrive is computed.

Where the place of the SSD is taken by a store that other instances use too, a prefill that no peer
is named for asks it first what it holds: then that is loaded as if it lay on an SSD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.cost.learned import LearnedFactor
from moonpool.cost.model import CostModel
from moonpool.kvcache.transfers import (
    FetchEnded,
    FetchProgress,
    LoadEnded,
    LoadProgress,
    LookUpEnded,
    ReadEnded,
    ReadRequested,
)
from moonpool.types import BlockKey
from moonpool.workers.actions import FetchBlocks, ForgetStored, GrantRead, LookUpBlocks
from moonpool.workers.active import ActiveWork, Pending
from moonpool.workers.batch import Batch
from moonpool.workers.early import EarlyStart
from moonpool.workers.holdings import Holdings
from moonpool.workers.messages import Fetch
from moonpool.workers.outbox import Outbox
from moonpool.workers.rest import Rest

FETCH_PATIENCE = 10.0
"""A fetch that takes so many times what it should is given up."""
PROBE_EVERY = 16
"""Of the loads that only what was learned speaks against, so many to one that is tried."""


@dataclass(slots=True)
class _Read:
    keys: Sequence[BlockKey]
    loads: set[str]


class Arrivals:
    """Works wait in the batch; `active.arriving` says whether they still must, unless they may
    begin early."""

    def __init__(
        self,
        holdings: Holdings,
        early: EarlyStart,
        batch: Batch,
        outbox: Outbox,
        cost: CostModel,
        learning: bool = True,
    ) -> None:
        """`learning`: loads are believed to take what they were seen to take."""
        self.promotion = early.promotion
        self._early = early
        self._holdings = holdings
        self._pool = holdings.pool
        self._batch = batch
        self._outbox = outbox
        self._cost = cost
        self._load_factor = LearnedFactor()  # by which loads take longer than `cost` says
        self._learning = learning
        self._num_doubted = 0  # loads that would have paid by `cost` alone
        self._works: dict[str, list[ActiveWork]] = {}  # by the load they wait for
        self._reads: dict[str, _Read] = {}  # those that wait for loads

    # Works

    def begin(self, active: ActiveWork, fetch: Fetch | None) -> None:
        """Has loaded and fetched what is missing of a new work's prefix."""
        holdings = self._holdings
        if not holdings.caches(active) or (fetch is None and not holdings.num_slots):
            return
        keys = active.keys[: holdings.max_cached_blocks(active)]
        if fetch is None and self._ask(active, keys):
            return
        num_local = self._load(active, keys)
        if fetch is not None:
            self._fetch(active, fetch, keys[: fetch.num_blocks], num_local)

    def _ask(self, active: ActiveWork, keys: Sequence[BlockKey]) -> bool:
        """Asks a shared store for what is not known of `keys`; False if there is no need."""
        if not self._holdings.store_shared:
            return False
        num_known, _ = self.promotion.reach(keys)
        if num_known == len(keys):
            return False
        active.asked_from = num_known
        self._outbox.do(LookUpBlocks(active.work_id, tuple(keys[num_known:])))
        return True

    def on_looked_up(self, active: ActiveWork, event: LookUpEnded) -> None:
        """What was found is loaded, as far as that still pays."""
        asked_from, tier = active.asked_from, self._holdings.tier
        assert asked_from is not None
        assert tier is not None
        active.asked_from = None
        self._batch.stop_repeating()
        self._outbox.count("failed_lookups", 1 if event.error else 0)
        if tier.lost:
            return
        keys = active.keys[: self._holdings.max_cached_blocks(active)]
        voided = tier.learn(keys[asked_from : asked_from + event.num_blocks], asked_from)
        if voided:
            self._outbox.do(ForgetStored(tuple(voided)))
        self._outbox.count("found_blocks", event.num_blocks)
        self._load(active, keys)

    def _load(self, active: ActiveWork, keys: Sequence[BlockKey]) -> int:
        """Returns how many blocks of the prefix are here, or will be."""
        held = self._pool.match(keys)
        if not self._holdings.num_slots:
            return len(held)
        num_local, absent = self.promotion.reach(keys)
        if not absent or not self._pays(active, len(held), num_local, len(absent)):
            return len(held)
        # What is here must not be evicted for what is not.
        found = [block for block in map(self._pool.find, keys[:num_local]) if block is not None]
        self._pool.acquire(active.fetch_owner, found)
        loads = self.promotion.load(absent, self._early.wanted)
        if loads is None:
            self._pool.release(active.fetch_owner)
            return len(held)
        active.loads = loads
        active.num_loaded_tokens = len(absent) * self._holdings.layout.block_tokens
        for load_id in loads:
            self._works.setdefault(load_id, []).append(active)
        return num_local

    def _pays(self, active: ActiveWork, num_held: int, num_local: int, num_absent: int) -> bool:
        """Whether loading gives the first token sooner than computing. It goes on while the work
        waits for others."""
        layout, cost, num_tokens = self._holdings.layout, self._cost, len(active.tokens)
        told_s = cost.load_s(num_absent * layout.block_bytes, self.promotion.num_loads + 1)
        load_s = told_s * self._load_factor.value
        saved_s = cost.prefill_s(num_tokens, num_held * layout.block_tokens)
        saved_s -= cost.prefill_s(num_tokens, num_local * layout.block_tokens)
        if load_s < saved_s or load_s < saved_s + self._queue_s(active):
            return True
        # A belief that refuses every load would never be mended.
        self._num_doubted += told_s < saved_s
        return told_s < saved_s and self._num_doubted % PROBE_EVERY == 0

    def _queue_s(self, active: ActiveWork) -> float:
        """About how long the works before this one take."""
        queue_s = 0.0
        for other in (*self._batch.running, *self._batch.waiting):
            if other is not active and other.num_uncomputed > 1:
                known = other.num_fetched_tokens + other.num_loaded_tokens
                cached = max(other.num_scheduled, min(known, len(other.tokens)))
                queue_s += self._cost.prefill_s(len(other.tokens), cached)
        return queue_s

    def _fetch(
        self, active: ActiveWork, fetch: Fetch, keys: Sequence[BlockKey], num_local: int
    ) -> None:
        pool, layout, work = self._pool, self._holdings.layout, active.work
        missing_keys = keys[num_local:]
        if not missing_keys:
            return
        held = pool.match(keys[:num_local])
        if not active.loads:
            pool.acquire(active.fetch_owner, held)
        missing = pool.allocate(active.fetch_owner, len(missing_keys), held)
        if missing is None:
            if not active.loads:
                pool.release(active.fetch_owner)
            return
        active.fetched_blocks, active.fetch_first_index = missing, num_local
        active.pending.add(Pending.FETCH)
        # A source that hangs must not use up the time in which the gap could be computed.
        usual_s = self._cost.transfer_s(len(missing) * layout.block_bytes, same_host=False)
        timeout_s = min(work.timeout_s, FETCH_PATIENCE * (usual_s + fetch.load_s) + 1.0)
        self._outbox.do(FetchBlocks(work.work_id, fetch.source, missing_keys, missing, timeout_s))

    def on_fetch_progress(self, active: ActiveWork | None, event: FetchProgress) -> None:
        if active is None:
            return  # nobody computes with what is taken over
        num_layers = self._holdings.layout.num_layers
        active.granted_blocks = event.num_blocks
        if event.num_layers:
            before = active.fetch_rest
            active.fetch_rest = before.seen(event.num_layers, event.seconds, num_layers)
        else:
            num_bytes = event.num_blocks * self._holdings.layout.block_bytes
            active.fetch_rest = Rest(self._cost.transfer_s(num_bytes, same_host=False))

    def on_fetch_ended(self, active: ActiveWork, event: FetchEnded) -> None:
        active.pending.discard(Pending.FETCH)
        self._outbox.count("corrupt_slices", event.corrupt_slices)
        self._outbox.count("fetched_bytes", event.num_bytes)
        self._outbox.count("failed_fetches", 1 if event.error else 0)
        for offset in range(event.num_blocks):
            index = active.fetch_first_index + offset
            self._pool.seal(active.fetched_blocks[offset], active.keys[index], index)
        active.num_fetched_tokens = event.num_blocks * self._holdings.layout.block_tokens
        active.corrupt_slices += event.corrupt_slices
        active.fetch_s = event.seconds
        if not active.closing:
            self._hold_arrived(active)

    def _hold_arrived(self, active: ActiveWork) -> None:
        if active.early:
            self._early.on_arrival(active)
        else:
            self._holdings.hold_arrived(active)
        self._batch.stop_repeating()

    # Loads

    def on_load_progress(self, event: LoadProgress) -> None:
        """What it takes is believed until some of it has come, then seen."""
        layout, load_id = self._holdings.layout, event.load_id
        num_blocks = self.promotion.size_of(load_id)
        if not num_blocks:
            return
        if event.num_layers:
            before = self.promotion.rest(load_id) or Rest()
            rest = before.seen(event.num_layers, event.seconds, layout.num_layers)
        else:
            left_s = self._cost.load_s(num_blocks * layout.block_bytes, 1)
            rest = Rest(left_s * self._load_factor.value)
        self.promotion.note_rest(load_id, rest)

    def on_load_ended(self, event: LoadEnded) -> None:
        """Those who waited take what has arrived."""
        if self._learning and not event.error and not event.corrupt_slices:
            num_sharing = self.promotion.num_sharing(event.load_id)
            expected_s = self._cost.load_s(event.num_bytes, num_sharing)
            self._load_factor.observe(event.seconds, expected_s)
        missing = set(self.promotion.on_ended(event))
        early: list[ActiveWork] = []
        for active in self._works.pop(event.load_id, ()):
            active.loads.discard(event.load_id)
            lacking = len(missing.intersection(active.keys)) if missing else 0
            active.num_loaded_tokens -= lacking * self._holdings.layout.block_tokens
            active.corrupt_slices += event.corrupt_slices
            if active.early:
                early.append(active)
            elif not active.closing:
                self._hold_arrived(active)
        for read_id, read in list(self._reads.items()):
            read.loads.discard(event.load_id)
            if not read.loads:
                del self._reads[read_id]
                self._grant(read_id, read.keys)
        self.promotion.let_go(event.load_id)
        for active in early:  # they hold what they compute with, and may need what was let go
            if not active.closing:
                self._hold_arrived(active)

    # Peers' reads

    def on_read_requested(self, event: ReadRequested) -> None:
        num_local, absent = self.promotion.reach(event.keys)
        if absent and self._holdings.num_slots:
            # Until they are all here, those that are must stay.
            found = map(self._pool.find, event.keys[:num_local])
            self._pool.acquire(_reader(event.read_id), [b for b in found if b is not None])
            loads = self.promotion.load(absent)
            if loads:
                self._reads[event.read_id] = _Read(event.keys, loads)
                return
        self._grant(event.read_id, event.keys)

    def on_read_ended(self, event: ReadEnded) -> None:
        self._reads.pop(event.read_id, None)
        self._pool.forget(event.corrupt)
        self._pool.release(_reader(event.read_id))

    def _grant(self, read_id: str, keys: Sequence[BlockKey]) -> None:
        blocks = self._pool.match(keys)
        self._pool.release(_reader(read_id))
        self._pool.acquire(_reader(read_id), blocks)
        self._outbox.do(GrantRead(read_id, blocks))


def _reader(read_id: str) -> str:
    return f"read:{read_id}"
