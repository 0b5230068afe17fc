"""An instance's blocks as its works see them: what is cached of a prefix, what is named when."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.config import InstanceConfig
from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.eviction import make_eviction
from moonpool.kvcache.hashing import extend_keys, root_key
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.partitions import PartedSpares, PartitionedPool
from moonpool.kvcache.segments import SegmentedPool
from moonpool.kvcache.spare_first import SpareFirst
from moonpool.kvcache.tiers import SsdTier
from moonpool.types import BlockId, BlockKey
from moonpool.workers.active import ActiveWork
from moonpool.workers.messages import BlocksChanged, BlocksSnapshot, MarkCopies, TierLoad


class Holdings:
    """Both tiers, and the numbering of what is told about them. Holds are the works' own."""

    def __init__(
        self,
        config: InstanceConfig,
        layout: BlockLayout,
        num_blocks: int,
        arenas: Sequence[int] = (),
        segment_blocks: int = 0,
    ) -> None:
        """`arenas`: of how many blocks each, if they lie in several; `segment_blocks`: of how many
        that one sequence has there lie in one, if it may lie in several."""
        self.layout = layout
        self.pool: BlockPool
        self.spares: SpareFirst | PartedSpares

        def policy(size: int) -> SpareFirst:
            return SpareFirst(make_eviction(config.eviction, size))

        if arenas:
            parted = PartitionedPool(arenas, policy)
            if segment_blocks:
                parted = SegmentedPool(arenas, segment_blocks, policy)
            self.pool, self.spares = parted, PartedSpares(parted)
        else:
            self.spares = policy(num_blocks)
            self.pool = BlockPool(num_blocks, self.spares)
        self.tier: SsdTier | None = None
        if config.ssd_blocks and config.prefix_caching:
            self.tier = SsdTier(
                config.ssd_blocks, num_blocks, config.ssd_admission, config.eviction
            )
        self.num_dropped = 0  # blocks evicted for want of room that the SSD has not
        self.store_shared = config.store_shared and self.tier is not None
        self._prefix_caching = config.prefix_caching
        self._next_sequence = 0

    @property
    def num_slots(self) -> int:
        """Of the SSD, as long as there is one that answers."""
        return 0 if self.tier is None or not self.tier.usable else self.tier.slots.num_blocks

    def is_shared(self, key: BlockKey) -> bool:
        """Other instances can load the block without this one, too."""
        tier = self.tier
        if tier is None or not self.store_shared or not tier.usable:
            return False
        return tier.knows(key)

    def tier_load(self) -> TierLoad | None:
        """The SSD's gauges as they are now."""
        if self.tier is None:
            return None
        slots = self.tier.slots
        return TierLoad(
            blocks=slots.num_blocks,
            held=slots.num_held,
            available=slots.num_available,
            cached=slots.num_cached,
            owners=slots.owners(),
            error=self.tier.error or self.tier.paused,
        )

    def caches(self, active: ActiveWork) -> bool:
        return self._prefix_caching and active.work.use_cache

    def name_prompt(self, active: ActiveWork) -> None:
        """Names the work's full blocks, as far as its tokens are known (mutates `active.keys`)."""
        if not self.caches(active):
            return
        if active.work.keys is not None:
            active.keys = list(active.work.keys)
        else:
            root = root_key(self.layout.fingerprint, active.work.tenant)
            extend_keys(active.keys, active.tokens, self.layout.block_tokens, root)

    def max_cached_blocks(self, active: ActiveWork) -> int:
        """At least one token must be computed, or there would be nothing to draw from."""
        return (len(active.tokens) - 1) // self.layout.block_tokens

    def cached_prefix(self, active: ActiveWork) -> list[BlockId]:
        """Blocks of the work's prefix that are here now; hold them at once."""
        if not self.caches(active):
            return []
        return self.pool.match(active.keys[: self.max_cached_blocks(active)])

    def hold_arrived(self, active: ActiveWork) -> None:
        """Holds what is here of the work's prefix while it waits, with gaps where more is on its
        way. Only what has a name is worth holding."""
        if not active.writing:  # what is being written must not be let go
            self.pool.release(active.fetch_owner)
        if active.arriving:
            found = self.pool.find_all(active.keys[: self.max_cached_blocks(active)])
        else:
            found = self.cached_prefix(active)
        self.pool.acquire(active.fetch_owner, found)

    def hold_prefix(self, active: ActiveWork, num_blocks: int) -> int | None:
        """Holds cached blocks of the work's prefix and new ones up to `num_blocks`; returns how
        many were cached, or None, holding nothing, if there is no room."""
        assert not active.block_ids
        cached = self.cached_prefix(active)
        self.pool.acquire(active.owner, cached)
        blocks = self.pool.allocate(active.owner, num_blocks - len(cached), cached)
        if blocks is None:
            self.pool.release(active.owner)
            # There may be room elsewhere, where none of it is cached.
            blocks = self.pool.allocate(active.owner, num_blocks) if cached else None
            cached = []
        if blocks is None:
            return None
        active.block_ids = cached + blocks
        active.num_sealed = len(cached)
        active.num_computed = active.num_scheduled = len(cached) * self.layout.block_tokens
        return len(cached)

    def grow(self, active: ActiveWork, num_tokens: int) -> bool:
        """Holds as many blocks as `num_tokens` need. False, changing nothing, without room."""
        lacking = self.layout.blocks_for(num_tokens) - len(active.block_ids)
        if lacking <= 0:
            return True
        blocks = self.pool.allocate(active.owner, lacking, active.block_ids)
        if blocks is None:
            return False
        active.block_ids.extend(blocks)
        return True

    def let_go(self, active: ActiveWork) -> None:
        """Ends the work's holds; what was sealed stays cached."""
        self.pool.release(active.owner)
        active.block_ids, active.num_sealed = [], 0
        active.num_computed = active.num_scheduled = 0

    def seal(self, active: ActiveWork) -> None:
        """Names the full blocks whose KVCache is complete."""
        num_full = active.num_computed // self.layout.block_tokens
        start = active.num_sealed
        if num_full <= start or not self.caches(active):
            return
        if active.work.keys is None:
            root = root_key(self.layout.fingerprint, active.work.tenant)
            extend_keys(active.keys, active.tokens, self.layout.block_tokens, root)
        # Without tokens there are no names past those that were given.
        end = min(num_full, len(active.keys))
        if start < end:
            self.pool.seal_run(active.block_ids[start:end], active.keys[start:end], start)
            active.num_sealed = end

    def mark_copies(self, copies: MarkCopies) -> None:
        """Those that are not here any more are no news."""
        for keys, spare in ((copies.spare, True), (copies.last, False)):
            self.spares.mark(self.pool.find_all(keys), spare)

    def take_changes(self) -> BlocksChanged | None:
        """The report of what appeared and vanished since the last one; None if nothing did."""
        tier = self.tier
        if not (self.pool.has_changes or (tier is not None and tier.slots.has_changes)):
            return None
        changes = self.pool.take_changes()
        removed = changes.removed
        demoted: list[BlockKey] = []
        if tier is not None:
            self._note_evicted(tier, changes.evicted)
            removed, demoted = self._below(tier, removed)
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
        """All names, in place of the changes not yet taken. Who else has them will be told anew."""
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

    def _below(
        self, tier: SsdTier, removed: list[BlockKey]
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """What is nowhere any more, and what is on the SSD only: of the names that DRAM has lost,
        and of those that came to the SSD or left it without DRAM having them."""
        changes = tier.slots.take_changes()
        candidates = dict.fromkeys([*removed, *changes.stored, *changes.removed])
        gone: list[BlockKey] = []
        demoted: list[BlockKey] = []
        for key in candidates:
            if self.pool.find(key) is None:
                (gone if tier.slot_of(key) is None else demoted).append(key)
        return gone, demoted
