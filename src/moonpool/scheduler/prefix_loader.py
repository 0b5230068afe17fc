"""Brings the missing blocks of a prompt's prefix into this instance's DRAM before its prefill.

Blocks come from the instance's SSD where loading is faster than computing. At the same time, the
blocks after them come from the peer that the Conductor named. Blocks that do not arrive are
computed. A peer that reads blocks from this instance's SSD gets its answer when the blocks are in
DRAM.

With a shared store in place of the SSD, a prefill without a named peer first looks up which blocks
the store has. These blocks are then loaded as if they were on an SSD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.cost.model import CostModel
from moonpool.cost.online import LearnedFactor
from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.messages import AttemptId, PrefixSource
from moonpool.protocol.transfer_events import (
    FetchEnded,
    FetchProgress,
    LoadEnded,
    LoadProgress,
    LookUpEnded,
    ReadEnded,
    ReadRequested,
)
from moonpool.scheduler.actions import (
    ActionBuffer,
    FetchBlocks,
    ForgetStored,
    GrantRead,
    LookUpBlocks,
)
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.loading.layerwise_overlap import LayerwiseOverlap
from moonpool.scheduler.request_state import PendingTransfer, RequestState, TransferEta
from moonpool.scheduler.scheduler import Scheduler
from moonpool.types import BlockKey

FETCH_PATIENCE = 10.0
"""A fetch ends after this multiple of its expected time, plus one second."""
PROBE_EVERY = 16
"""If only the learned factor speaks against loading, one load in this many runs anyway."""


@dataclass(slots=True)
class _Read:
    keys: Sequence[BlockKey]
    load_ids: set[str]


class PrefixLoader:
    """Owns the fetches, loads and look-ups of waiting requests, and the reads of peers.

    The scheduler holds the requests: it skips a request while `RequestState.arriving` is true,
    unless `LayerwiseOverlap` lets the request compute early.
    """

    def __init__(
        self,
        requests: Mapping[AttemptId, RequestState],
        kv_cache: KVCacheManager,
        overlap: LayerwiseOverlap,
        scheduler: Scheduler,
        actions_out: ActionBuffer,
        cost: CostModel,
        learning: bool = True,
    ) -> None:
        """`requests` is the instance's own dict of requests. With `learning`, measured load times
        correct the cost model's."""
        self.promotion = overlap.promotion
        self._requests = requests
        self._overlap = overlap
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._scheduler = scheduler
        self._actions_out = actions_out
        self._cost = cost
        # factor by which loads take longer than `cost` predicts
        self._load_factor = LearnedFactor()
        self._learning = learning
        # number of loads that would pay by `cost`, but not with the learned factor
        self._num_doubted = 0
        # id of a load -> requests that wait for it
        self._waiting_for: dict[str, list[RequestState]] = {}
        self._reads: dict[str, _Read] = {}  # reads of peers that wait for loads

    # Requests of this instance

    def begin(self, request: RequestState, fetch: PrefixSource | None) -> None:
        """Starts to load and fetch the missing prefix of a new request."""
        kv_cache = self._kv_cache
        if not kv_cache.caches(request) or (fetch is None and not kv_cache.num_slots):
            return
        keys = request.keys[: kv_cache.max_cached_blocks(request)]
        if fetch is None and self._look_up(request, keys):
            return
        num_local = self._load(request, keys)
        if fetch is not None:
            self._fetch(request, fetch, keys[: fetch.num_blocks], num_local)

    def _look_up(self, request: RequestState, keys: Sequence[BlockKey]) -> bool:
        """Looks up unknown `keys` in a shared store. Returns False if no look-up is needed."""
        if not self._kv_cache.store_shared:
            return False
        num_known, _ = self.promotion.reach(keys)
        if num_known == len(keys):
            return False
        request.lookup_start = num_known
        self._actions_out.perform(LookUpBlocks(request.attempt_id, tuple(keys[num_known:])))
        return True

    def on_look_up_ended(self, event: LookUpEnded) -> None:
        """Loads the blocks that the shared store has, if that still pays."""
        request = self._requests.get(AttemptId(event.lookup_id))
        if request is None or request.lookup_start is None or request.closing:
            return
        start, tier = request.lookup_start, self._kv_cache.tier
        assert tier is not None
        request.lookup_start = None
        self._scheduler.stop_repeating()
        self._actions_out.count("failed_lookups", 1 if event.error else 0)
        if tier.lost:
            return
        keys = request.keys[: self._kv_cache.max_cached_blocks(request)]
        voided = tier.learn(keys[start : start + event.num_blocks], start)
        if voided:
            self._actions_out.perform(ForgetStored(tuple(voided)))
        self._actions_out.count("found_blocks", event.num_blocks)
        self._load(request, keys)

    def _load(self, request: RequestState, keys: Sequence[BlockKey]) -> int:
        """Starts loads if they pay. Returns how many blocks of the prefix are or will be in this
        instance's DRAM."""
        held = self._pool.match(keys)
        if not self._kv_cache.num_slots:
            return len(held)
        num_local, absent = self.promotion.reach(keys)
        if not absent or not self._pays(request, len(held), num_local, len(absent)):
            return len(held)
        # The blocks in DRAM are held, so that loading the others does not evict them.
        found = [block for block in map(self._pool.find, keys[:num_local]) if block is not None]
        self._pool.acquire(request.fetch_owner, found)
        load_ids = self.promotion.load(absent, self._overlap.enabled)
        if load_ids is None:
            self._pool.release(request.fetch_owner)
            return len(held)
        request.load_ids = load_ids
        request.num_loaded_tokens = len(absent) * self._kv_cache.layout.block_tokens
        for load_id in load_ids:
            self._waiting_for.setdefault(load_id, []).append(request)
        return num_local

    def _pays(self, request: RequestState, num_held: int, num_local: int, num_absent: int) -> bool:
        """Whether loading gives the first token sooner than computing. The time that the request
        waits for other requests does not count, because loading continues meanwhile."""
        layout, cost, num_tokens = self._kv_cache.layout, self._cost, len(request.tokens)
        predicted_s = cost.load_s(num_absent * layout.block_bytes, self.promotion.num_loads + 1)
        load_s = predicted_s * self._load_factor.value
        saved_s = cost.prefill_s(num_tokens, num_held * layout.block_tokens)
        saved_s -= cost.prefill_s(num_tokens, num_local * layout.block_tokens)
        if load_s < saved_s or load_s < saved_s + self._queue_s(request):
            return True
        # If the learned factor refused every load, no measurement could correct it any more.
        self._num_doubted += predicted_s < saved_s
        return predicted_s < saved_s and self._num_doubted % PROBE_EVERY == 0

    def _queue_s(self, request: RequestState) -> float:
        """Returns the estimated seconds of the prefills before this request."""
        queue_s = 0.0
        for other in (*self._scheduler.running, *self._scheduler.waiting):
            if other is not request and other.num_uncomputed > 1:
                known = other.num_fetched_tokens + other.num_loaded_tokens
                cached = max(other.num_scheduled, min(known, len(other.tokens)))
                queue_s += self._cost.prefill_s(len(other.tokens), cached)
        return queue_s

    def _fetch(
        self, request: RequestState, fetch: PrefixSource, keys: Sequence[BlockKey], num_local: int
    ) -> None:
        """Fetches the blocks after the first `num_local`; does nothing if there is no room."""
        pool, layout, attempt = self._pool, self._kv_cache.layout, request.attempt
        missing_keys = keys[num_local:]
        if not missing_keys:
            return
        held = pool.match(keys[:num_local])
        if not request.load_ids:
            pool.acquire(request.fetch_owner, held)
        missing = self._kv_cache.sequences.allocate(request.fetch_owner, len(missing_keys), held)
        if missing is None:
            if not request.load_ids:
                pool.release(request.fetch_owner)
            return
        request.fetched_blocks, request.fetch_first_index = missing, num_local
        request.pending.add(PendingTransfer.FETCH)
        # The gap must still be computable in time after a source that hangs.
        usual_s = self._cost.transfer_s(len(missing) * layout.block_bytes, same_host=False)
        timeout_s = min(attempt.timeout_s, FETCH_PATIENCE * (usual_s + fetch.load_s) + 1.0)
        self._actions_out.perform(
            FetchBlocks(attempt.attempt_id, fetch.source, missing_keys, missing, timeout_s)
        )

    def on_fetch_progress(self, event: FetchProgress) -> None:
        """Updates the estimate of a request's fetch; a takeover's fetch needs no estimate."""
        request = self._requests.get(AttemptId(event.fetch_id))
        if request is None:
            return
        num_layers = self._kv_cache.layout.num_layers
        request.num_granted_blocks = event.num_blocks
        if event.num_layers:
            before = request.fetch_eta
            request.fetch_eta = before.updated(event.num_layers, event.seconds, num_layers)
        else:
            num_bytes = event.num_blocks * self._kv_cache.layout.block_bytes
            request.fetch_eta = TransferEta(self._cost.transfer_s(num_bytes, same_host=False))

    def on_fetch_ended(self, request: RequestState, event: FetchEnded) -> None:
        """Caches the blocks that arrived; the request computes the missing ones."""
        request.pending.discard(PendingTransfer.FETCH)
        self._actions_out.count("corrupt_slices", event.corrupt_slices)
        self._actions_out.count("fetched_bytes", event.num_bytes)
        self._actions_out.count("failed_fetches", 1 if event.error else 0)
        for offset in range(event.num_blocks):
            index = request.fetch_first_index + offset
            self._pool.cache_block(request.fetched_blocks[offset], request.keys[index], index)
        request.num_fetched_tokens = event.num_blocks * self._kv_cache.layout.block_tokens
        request.corrupt_slices += event.corrupt_slices
        request.fetch_s = event.seconds
        num_tokens = request.num_fetched_tokens
        request.report_span(self._actions_out, "fetch", event.seconds, num_tokens, event.num_bytes)
        if not request.closing:
            self._acquire_arrived(request)

    def _acquire_arrived(self, request: RequestState) -> None:
        if request.overlapping:
            self._overlap.on_transfer_ended(request)
        else:
            self._kv_cache.acquire_arrived(request)
        self._scheduler.stop_repeating()

    # Loads

    def on_load_progress(self, event: LoadProgress) -> None:
        """Updates the estimate of a load: by the cost model until its first layer has arrived, then
        by the time that its layers took."""
        layout, load_id = self._kv_cache.layout, event.load_id
        num_blocks = self.promotion.size_of(load_id)
        if not num_blocks:
            return
        if event.num_layers:
            before = self.promotion.eta(load_id) or TransferEta()
            eta = before.updated(event.num_layers, event.seconds, layout.num_layers)
        else:
            left_s = self._cost.load_s(num_blocks * layout.block_bytes, 1)
            eta = TransferEta(left_s * self._load_factor.value)
        self.promotion.set_eta(load_id, eta)

    def on_load_ended(self, event: LoadEnded) -> None:
        """Hands the blocks that arrived to the requests and peers that waited for them."""
        if self._learning and not event.error and not event.corrupt_slices:
            num_sharing = self.promotion.num_sharing(event.load_id)
            expected_s = self._cost.load_s(event.num_bytes, num_sharing)
            self._load_factor.observe(event.seconds, expected_s)
        missing = set(self.promotion.on_ended(event))
        overlapping: list[RequestState] = []
        for request in self._waiting_for.pop(event.load_id, ()):
            request.load_ids.discard(event.load_id)
            lacking = len(missing.intersection(request.keys)) if missing else 0
            request.num_loaded_tokens -= lacking * self._kv_cache.layout.block_tokens
            request.corrupt_slices += event.corrupt_slices
            request.report_span(self._actions_out, "ssd_load", event.seconds, 0, event.num_bytes)
            if request.overlapping:
                overlapping.append(request)
            elif not request.closing:
                self._acquire_arrived(request)
        for read_id, read in list(self._reads.items()):
            read.load_ids.discard(event.load_id)
            if not read.load_ids:
                del self._reads[read_id]
                self._grant(read_id, read.keys)
        self.promotion.free(event.load_id)
        # These requests hold their blocks themselves, and may need the blocks that were just freed.
        for request in overlapping:
            if not request.closing:
                self._acquire_arrived(request)

    # Reads of peers

    def on_read_requested(self, event: ReadRequested) -> None:
        """Grants a peer's read, after loading blocks that are on the SSD only."""
        num_local, absent = self.promotion.reach(event.keys)
        if absent and self._kv_cache.num_slots:
            # The blocks in DRAM are held until the others have been loaded.
            found = map(self._pool.find, event.keys[:num_local])
            self._pool.acquire(
                BlockOwner("read", event.read_id), [b for b in found if b is not None]
            )
            load_ids = self.promotion.load(absent)
            if load_ids:
                self._reads[event.read_id] = _Read(event.keys, load_ids)
                return
        self._grant(event.read_id, event.keys)

    def on_read_ended(self, event: ReadEnded) -> None:
        """Ends the holds of a peer's read, and drops blocks whose content proved corrupt."""
        self._reads.pop(event.read_id, None)
        self._pool.uncache(event.corrupt)
        self._pool.release(BlockOwner("read", event.read_id))

    def _grant(self, read_id: str, keys: Sequence[BlockKey]) -> None:
        blocks = self._pool.match(keys)
        self._pool.release(BlockOwner("read", read_id))
        self._pool.acquire(BlockOwner("read", read_id), blocks)
        self._actions_out.perform(GrantRead(read_id, blocks))
