"""Allocation and prefix caching of one instance's blocks, in DRAM and on the SSD.

Every hold on a block has a named owner in the block pool; `BlockPool.release(owner)` ends all holds
of that owner. Who holds blocks, and who ends the holds:

    owner                held blocks                        held by            ends with
    work:<attempt>       its block table                    allocate, grow     free, or the end of
                                                                               the attempt
    fetch:<attempt>      found, fetched or loaded prefix    PrefixLoader,      admission of the
                         of a request that waits            acquire_arrived    request, or its end
    load:<id>            where a load from the SSD writes   Promotion.load     Promotion.free
    demote:<id>          what a write to the SSD reads      Demotion           Demotion.on_ended
    read:<id>            what a peer reads                  PrefixLoader       on_read_ended
    ahead:<key>          a block to be copied to the SSD    Demotion           its write
    takeover:<n>         where a takeover writes            KvHandover.begin   on_fetch_ended
    hung:load:<id>       where a hung disk may still write  Promotion.free     Promotion.on_returned

One request's block table, with `hits` = blocks that `allocate` found in the prefix cache and
`cached` = `RequestState.num_cached_blocks`:

    interval         after allocate            after cache_full_blocks       after free
    [0, hits)        hashed; shared with       the same                      other owners keep it,
                     other owners                                            else evictable
    [hits, cached)   no hash; this owner's     hashed: other requests can    other owners keep it,
                     alone                     find and hold the block       else evictable
    [cached, end)    no hash; this owner's     the same: not full, or its    free list
                     alone                     tokens are not computed

`release_unseen` does to the leading blocks of a request what `free` does to all of its blocks.

If another block already has the hash, `cache_full_blocks` leaves the duplicate without one, and
`free` puts it on the free list.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvcache.block_owner import EVICTION
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.cache_shares import CacheShareEviction
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.kvcache.eviction.replica_aware import ReplicaAwareEviction
from moonpool.kvcache.ssd_tier import SsdTier
from moonpool.protocol.block_layout import BlockLayout, extend_keys, root_key
from moonpool.protocol.messages import BlocksChanged, BlocksSnapshot, MarkReplicas, TierLoad
from moonpool.scheduler.attention_pools.partitions import (
    OneArena,
    PartitionedPool,
    PartitionedReplicaAwareness,
    SequenceAllocator,
)
from moonpool.scheduler.attention_pools.segments import SegmentedPool
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.request_state import RequestState
from moonpool.scheduler.speculation.continuations import Continuations
from moonpool.types import BlockId, BlockKey, payer_of


class KVCacheManager:
    """The blocks of both tiers, and the events that report their changes to the Conductor."""

    def __init__(
        self,
        config: InstanceConfig,
        layout: BlockLayout,
        num_blocks: int,
        arenas: Sequence[int] = (),
        segment_blocks: int = 0,
    ) -> None:
        """`arenas`: blocks of each arena if there are several. `segment_blocks`: consecutive blocks
        of a sequence that share an arena, if one sequence may use several arenas."""
        self.layout = layout
        self.pool: BlockPool
        self.sequences: SequenceAllocator
        self.spares: ReplicaAwareEviction | PartitionedReplicaAwareness

        def policy(size: int) -> ReplicaAwareEviction:
            shared = CacheShareEviction(make_eviction(config.eviction, size), size)
            return ReplicaAwareEviction(shared)

        if arenas:
            parted = PartitionedPool(arenas, policy)
            if segment_blocks:
                parted = SegmentedPool(arenas, segment_blocks, policy)
            self.pool, self.sequences = parted, parted
            self.spares = PartitionedReplicaAwareness(parted)
        else:
            self.spares = policy(num_blocks)
            self.pool = BlockPool(num_blocks, self.spares)
            self.sequences = OneArena(self.pool)
        self.tier: SsdTier | None = None
        if config.ssd_blocks and config.prefix_caching:
            self.tier = SsdTier(
                config.ssd_blocks, num_blocks, config.ssd_admission, config.eviction
            )
        self.num_dropped = 0  # number of blocks evicted from DRAM that are not on the SSD
        self.store_shared = config.store_shared and self.tier is not None
        self._prefix_caching = config.prefix_caching
        self._kept_tokens = config.kept_tokens
        # whether all layers have a window, so that earlier tokens are not needed
        self.has_windows = config.kept_tokens > 0
        self.continuations: Continuations | None = None
        if config.speculative is not None:
            self.continuations = Continuations(self.pool, layout.block_tokens)
        self._next_sequence = 0
        # blocks that requests have found again, or None if there is no tier to copy them to
        self._reused: list[BlockId] | None = None
        if self.tier is not None and config.ssd_write_ahead and not config.store_shared:
            self._reused = []

    @property
    def num_slots(self) -> int:
        """Slots of the SSD; 0 if there is none, it is lost, or it does not respond."""
        return 0 if self.tier is None or not self.tier.usable else self.tier.slots.num_blocks

    def is_shared(self, key: BlockKey) -> bool:
        """Whether other instances can load the block from a shared store."""
        tier = self.tier
        if tier is None or not self.store_shared or not tier.usable:
            return False
        return tier.knows(key)

    def tier_load(self) -> TierLoad | None:
        """Returns the current gauges of the SSD, or None without an SSD."""
        if self.tier is None:
            return None
        slots = self.tier.slots
        return TierLoad(
            blocks=slots.num_blocks,
            held=slots.num_held,
            available=slots.num_available,
            cached=slots.num_cached,
            owners=slots.named_owners(),
            error=self.tier.error or self.tier.paused,
        )

    def caches(self, request: RequestState) -> bool:
        """Whether the request may use and fill the prefix cache."""
        return self._prefix_caching and request.attempt.use_cache

    def hash_prompt(self, request: RequestState) -> None:
        """Computes the keys of the request's full blocks."""
        if not self.caches(request):
            return
        if request.attempt.keys is not None:
            request.keys = list(request.attempt.keys)
        else:
            self._extend_keys(request)

    def _extend_keys(self, request: RequestState) -> None:
        attempt = request.attempt
        root = root_key(self.layout.fingerprint, attempt.tenant, attempt.adapter)
        extend_keys(request.keys, request.tokens, self.layout.block_tokens, root)

    def max_cached_blocks(self, request: RequestState) -> int:
        """Blocks that may come from the cache: at least one token must be computed, because the
        next token is drawn from it."""
        return (request.tokens.size - 1) // self.layout.block_tokens

    def cached_prefix(self, request: RequestState) -> list[BlockId]:
        """Returns the cached blocks of the request's prefix. Callers must acquire these blocks
        before the next allocation, which may evict them."""
        if not self.caches(request):
            return []
        return self.pool.match(request.keys[: self.max_cached_blocks(request)])

    def acquire_arrived(self, request: RequestState) -> None:
        """Holds the cached blocks of a waiting request's prefix, with gaps while more arrive."""
        if not request.fetching:  # blocks that a transfer may still write must stay held
            self.pool.release(request.fetch_owner)
        if request.arriving:
            found = self.pool.find_all(request.keys[: self.max_cached_blocks(request)])
        else:
            found = self.cached_prefix(request)
        self.pool.acquire(request.fetch_owner, found)

    def allocate(self, request: RequestState, num_blocks: int) -> int | None:
        """Holds the cached blocks of the request's prefix, and new ones up to `num_blocks`.
        Returns how many blocks were cached, or None, holding nothing, if there is no room."""
        assert not request.block_ids
        cached = self.cached_prefix(request)
        self.pool.acquire(request.owner, cached)
        blocks = self.sequences.allocate(request.owner, num_blocks - len(cached), cached)
        if blocks is None:
            self.pool.release(request.owner)
            # Another arena may have room for all blocks, though none of them is cached there.
            blocks = self.sequences.allocate(request.owner, num_blocks) if cached else None
            cached = []
        if blocks is None:
            return None
        request.block_ids = cached + blocks
        if self._reused is not None:
            self._reused += cached
        self._assign(request, cached)
        request.num_cached_blocks = len(cached)
        request.num_computed = request.num_scheduled = len(cached) * self.layout.block_tokens
        return len(cached)

    @property
    def writes_ahead(self) -> bool:
        """Whether blocks are copied to the SSD before they leave DRAM."""
        return self._reused is not None

    def take_reused(self) -> list[BlockId]:
        """Returns the cached blocks that requests have acquired since the last call, and clears the
        list."""
        if not self._reused:
            return []
        reused, self._reused = self._reused, []
        return reused

    def grow(self, request: RequestState, num_tokens: int) -> bool:
        """Extends the block table to hold `num_tokens`. Returns False, without any change, if
        there is no room."""
        lacking = self.layout.blocks_for(num_tokens) - len(request.block_ids)
        if lacking <= 0:
            return True
        blocks = self.sequences.allocate(request.owner, lacking, request.block_ids)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def shrink(self, request: RequestState) -> bool:
        """Ends the request's holds on blocks beyond those for its tokens. Returns False if the
        request holds no such blocks."""
        kept = self.layout.blocks_for(request.tokens.size)
        if len(request.block_ids) <= kept:
            return False
        self.pool.release_some(request.owner, request.block_ids[kept:])
        del request.block_ids[kept:]
        return True

    def free(self, request: RequestState) -> None:
        """Ends the request's holds on its block table; blocks with a hash stay cached."""
        self.pool.release(request.owner)
        request.block_ids, request.num_cached_blocks, request.num_unseen_blocks = [], 0, 0
        request.num_computed = request.num_scheduled = 0

    def cache_full_blocks(self, request: RequestState) -> None:
        """Adds the request's full blocks whose KVCache is complete to the prefix cache."""
        num_full = request.num_computed // self.layout.block_tokens
        start = request.num_cached_blocks
        if num_full <= start:
            return
        if request.attempt.keys is None:
            if not self.caches(request):
                return
            self._extend_keys(request)
        elif start >= len(request.keys) or not self.caches(request):
            return
        # Without token values, no block after those keyed by the request itself can get a key.
        end = min(num_full, len(request.keys))
        if start < end:
            self.pool.cache_run(request.block_ids[start:end], request.keys[start:end], start)
            request.num_cached_blocks = end
            self._assign(request, request.block_ids[start:end])
            if self.continuations is not None:
                self.continuations.note(request.keys, request.tokens, start, end)

    def _assign(self, request: RequestState, block_ids: Sequence[BlockId]) -> None:
        """Counts cached blocks of a tenant that has a share of the cache."""
        share = request.attempt.cache_share
        if share < 1.0:
            cached = [b for b in block_ids if self.pool.key_of(b) is not None]
            self.spares.assign(cached, payer_of(request.attempt.tenant), share)

    def release_unseen(self, request: RequestState) -> None:
        """Ends the request's holds on blocks that no later token attends to, because all layers
        have a window. Blocks with a hash stay cached. The full blocks must be cached before.

        A step in progress or a transfer may still touch these blocks; then a later call ends the
        holds. A kernel may read slightly outside the window, so a block of the window takes their
        place in the block table.
        """
        if not self.has_windows or request.steps_pending or request.pending:
            return
        if request.arriving or request.overlapping:
            return
        seen_from = request.num_computed - self._kept_tokens + 1
        end = min(seen_from // self.layout.block_tokens, len(request.block_ids) - 1)
        start = request.num_unseen_blocks
        if end > start:
            self.pool.release_some(request.owner, request.block_ids[start:end])
            request.block_ids[:end] = [request.block_ids[end]] * end
            request.num_unseen_blocks = end

    def mark_replicas(self, command: MarkReplicas) -> None:
        """Records which blocks are evicted first: those that other instances hold too, and those of
        programs that pause for long. Ignores blocks that have been evicted."""
        for keys, spare in ((command.spare, True), (command.last, False)):
            self.spares.mark(self.pool.find_all(keys), spare)

    def drop_cached(self) -> list[BlockId]:
        """Forgets all cached blocks that nobody holds. Returns the SSD slots whose content is now
        void."""
        voided: list[BlockId] = []
        if self.continuations is not None:
            self.continuations.forget()
        if self.tier is not None and not self.tier.lost:
            slots = self.tier.slots
            voided = slots.withdraw(EVICTION, slots.num_evictable)
            slots.release(EVICTION)
        self.pool.withdraw(EVICTION, self.pool.num_evictable)
        self.pool.release(EVICTION)
        return voided

    def take_changes(self) -> BlocksChanged | None:
        """Returns the changes since the last call, or None if there are none."""
        tier = self.tier
        if not (self.pool.has_changes or (tier is not None and tier.slots.has_changes)):
            return None
        changes = self.pool.take_changes()
        removed = changes.removed
        demoted: list[BlockKey] = []
        if tier is not None:
            self._note_evicted(tier, changes.evicted)
            removed, demoted = self._split_removed(tier, removed)
        if not (changes.stored or removed or demoted):
            return None
        sequence = self._next_sequence
        self._next_sequence += 1
        return BlocksChanged(
            sequence=sequence,
            stored=tuple(changes.stored),
            removed=tuple(removed),
            demoted=tuple(demoted),
        )

    def take_snapshot(self) -> BlocksSnapshot:
        """Returns all cached blocks, and drops the changes not taken yet. Also drops the marks of
        replicas: the Conductor sends them again after a snapshot."""
        self.take_changes()
        self.spares.forget_marks()
        demoted: list[BlockKey] = []
        if self.tier is not None:
            stored = self.tier.slots.keys()
            demoted = [key for key in stored if self.pool.find(key) is None]
        return BlocksSnapshot(
            next_sequence=self._next_sequence,
            keys=tuple(self.pool.keys()),
            demoted=tuple(demoted),
        )

    def _note_evicted(self, tier: SsdTier, evicted: list[BlockKey]) -> None:
        dropped = []
        for key in evicted:
            slot = tier.slot_of(key)
            if slot is None:
                dropped.append(key)
            else:
                tier.touch([slot])
        tier.note_dropped(dropped)
        self.num_dropped += len(dropped)

    def _split_removed(
        self, tier: SsdTier, removed: list[BlockKey]
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Returns the blocks that are gone, and the blocks that are on the SSD only. Looks at the
        blocks removed from DRAM and at the blocks that the SSD gained or lost."""
        changes = tier.slots.take_changes()
        changed = dict.fromkeys([*removed, *changes.stored, *changes.removed])
        gone: list[BlockKey] = []
        demoted: list[BlockKey] = []
        for key in changed:
            if self.pool.find(key) is None:
                (gone if tier.slot_of(key) is None else demoted).append(key)
        return gone, demoted
