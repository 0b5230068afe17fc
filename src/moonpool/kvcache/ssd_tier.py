"""The SSD tier of one instance: it knows which block is in which slot, and decides which blocks are
admitted.

A slot is room for one block on the disk (a disk block). The slots are a separate `BlockPool`, so
they are held, cached and evicted like blocks in DRAM. A block that is read back stays on the disk
(the tiers are inclusive), so it is not written again when it leaves DRAM again.

Admission is "always" or "second-use". Most blocks are never used again; writing them would wear the
disk and evict others. "second-use" therefore admits a block that was used in DRAM after it was
computed, or that was dropped before: the keys of dropped blocks (ghosts) are remembered for a
while.

This module does bookkeeping only: it moves no bytes and does not decide when to move a block
(`scheduler.ssd_tiering` and `scheduler.prefix_loader` do).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonpool.config.tables import SsdAdmission
from moonpool.kvcache.block_owner import EVICTION, BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.cache_shares import CacheShareEviction
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.types import BlockId, BlockKey

_TOUCH, _LEARN = BlockOwner("touch"), BlockOwner("learn")

GHOSTS_PER_BLOCK = 2
"""Keys of dropped blocks that are remembered, per block of both tiers."""


class SsdTier:
    """The slots 0 .. num_slots - 1 of one instance's disk, until `lose`."""

    def __init__(
        self, num_slots: int, num_blocks: int, admission: SsdAdmission, eviction: str
    ) -> None:
        """`num_blocks` is the size of the DRAM pool above this tier."""
        self._shares = CacheShareEviction(make_eviction(eviction, num_slots), num_slots)
        self.slots = BlockPool(num_slots, self._shares)
        self.error = ""  # why the tier is lost, or "" while it is not lost
        self.paused = ""  # why the disk is not used for now, or "" while it responds
        self._admits_all = admission == "always"
        self._max_ghosts = GHOSTS_PER_BLOCK * (num_slots + num_blocks)
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def lost(self) -> bool:
        return bool(self.error)

    @property
    def usable(self) -> bool:
        """Whether blocks can be read and written now."""
        return not self.error and not self.paused

    def slot_of(self, key: BlockKey) -> BlockId | None:
        """Returns the slot of the block, or None. The slot may be reused by the next `reserve`, so
        call `hold` first."""
        return self.slots.find(key)

    def hold(self, owner: BlockOwner, slots: Iterable[BlockId]) -> None:
        """Protects slots from eviction while they are read; this counts as a use."""
        self.slots.acquire(owner, slots)

    def touch(self, slots: Sequence[BlockId]) -> None:
        """Counts a use of slots whose blocks would be written now if they were not on the disk."""
        self.slots.acquire(_TOUCH, slots)
        self.slots.release(_TOUCH)

    def admits(self, key: BlockKey, reused: bool) -> bool:
        """Whether a block that leaves DRAM is worth a write; if not, remembers its key.
        `reused`: whether the block was used in DRAM after it was computed."""
        if self.would_admit(key, reused):
            return True
        self.note_dropped((key,))
        return False

    def would_admit(self, key: BlockKey, reused: bool) -> bool:
        """Returns what `admits` would, without remembering the key."""
        return self._admits_all or reused or key in self._ghosts

    def note_dropped(self, keys: Iterable[BlockKey]) -> None:
        """Remembers the keys of blocks that left DRAM and are not in this tier."""
        ghosts = self._ghosts
        for key in keys:
            ghosts[key] = None
            ghosts.move_to_end(key)
        while len(ghosts) > self._max_ghosts:
            ghosts.popitem(last=False)

    def reserve(self, owner: BlockOwner, num_slots: int) -> tuple[list[BlockId], list[BlockId]]:
        """Holds up to `num_slots` slots without keys, evicting cached ones if need be.
        Returns the held slots, and the evicted slots, whose content is now void."""
        num_slots = min(num_slots, self.slots.num_available)
        voided: list[BlockId] = []
        lacking = num_slots - self.slots.num_free
        if lacking > 0:
            voided = self.slots.withdraw(EVICTION, lacking)
            self.slots.release(EVICTION)
        reserved = self.slots.allocate(owner, num_slots)
        assert reserved is not None
        return reserved, voided

    def learn(self, keys: Sequence[BlockKey], first_depth: int) -> list[BlockId]:
        """Adds blocks that other instances put into a shared store: consecutive blocks of a prompt,
        the first at index `first_depth`. Returns the slots whose content becomes void."""
        new = [(depth, key) for depth, key in enumerate(keys, first_depth) if not self.knows(key)]
        slots, voided = self.reserve(_LEARN, len(new))
        for slot, (depth, key) in zip(slots, new, strict=False):
            self.fill(slot, key, depth)
        self.slots.release(_LEARN)
        return voided

    def knows(self, key: BlockKey) -> bool:
        """Whether the block is in the SSD tier."""
        return self.slots.find(key) is not None

    def fill(
        self,
        slot: BlockId,
        key: BlockKey,
        depth: int,
        owner: tuple[str, float] | None = None,
    ) -> bool:
        """Gives a written slot the key of its block. `owner`: the tenant and share, as `owner_of`
        of an eviction policy returns them. Returns False if the tier is lost, or if another slot
        got the same block meanwhile."""
        self._ghosts.pop(key, None)
        filled = not self.lost and self.slots.cache_block(slot, key, depth)
        if filled and owner is not None:
            self._shares.assign((slot,), *owner)
        return filled

    def lose(self, error: str) -> None:
        """Notes that the disk's content is gone, and takes all keys away. Holds on slots end as
        usual."""
        self.error = error or "the disk is gone"
        self.slots.withdraw(EVICTION, self.slots.num_evictable)
        self.slots.release(EVICTION)
        self.slots.uncache(self.slots.cached_blocks())  # slots that are being read
        self._ghosts.clear()

    def validate(self) -> None:
        """Asserts that the slots are consistent and the ghosts bounded."""
        self.slots.validate()
        self._shares.validate()
        assert len(self._ghosts) <= self._max_ghosts
        assert not (self.lost and self.slots.num_cached)
