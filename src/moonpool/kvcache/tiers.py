"""The SSD tier of one instance: which block lies in which slot, and which may come in.

A slot is a place on the disk for one block. Slots are a block pool of their own, so they are held,
named and evicted as blocks in DRAM are. What is read back stays on the disk (the tiers are
inclusive): when it leaves DRAM again, it need not be written again.

Admission: "always", or "second-use". Most blocks are never used again, and writing them would only
wear the disk and drive out others. So a block comes in that was used in DRAM after it was computed,
or that has been dropped before: the names of dropped blocks are remembered for a while.

Bookkeeping only: no bytes, and no decision when to move what (`workers.demotion`, `.promotion`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonpool.config import SsdAdmission
from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.eviction import make_eviction
from moonpool.types import BlockId, BlockKey

GHOSTS_PER_BLOCK = 2
"""Names of dropped blocks remembered, per block of both tiers."""


class SsdTier:
    """Until `lose`, the slots 0 .. num_slots - 1."""

    def __init__(
        self, num_slots: int, num_blocks: int, admission: SsdAdmission, eviction: str
    ) -> None:
        """`num_blocks`: of the DRAM pool above it."""
        self.slots = BlockPool(num_slots, make_eviction(eviction, num_slots))
        self.error = ""  # why it is gone; "" while it is not
        self.paused = ""  # why nothing is asked of it for now; "" while it answers
        self._admits_all = admission == "always"
        self._max_ghosts = GHOSTS_PER_BLOCK * (num_slots + num_blocks)
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def lost(self) -> bool:
        return bool(self.error)

    @property
    def usable(self) -> bool:
        return not self.error and not self.paused

    def slot_of(self, key: BlockKey) -> BlockId | None:
        """Where the block is; safe until the next `reserve`: hold it at once."""
        return self.slots.find(key)

    def hold(self, owner: str, slots: Iterable[BlockId]) -> None:
        """Keeps slots from eviction while they are read; counts as their use."""
        self.slots.acquire(owner, slots)

    def touch(self, slots: Sequence[BlockId]) -> None:
        """These would be written now, were they not here already."""
        self.slots.acquire("touch", slots)
        self.slots.release("touch")

    def admits(self, key: BlockKey, reused: bool) -> bool:
        """Whether a block that leaves DRAM is worth a write; if not, its name is remembered
        (mutates)."""
        if self._admits_all or reused or key in self._ghosts:
            return True
        self.note_dropped((key,))
        return False

    def note_dropped(self, keys: Iterable[BlockKey]) -> None:
        """These left DRAM, and are not here."""
        ghosts = self._ghosts
        for key in keys:
            ghosts[key] = None
            ghosts.move_to_end(key)
        while len(ghosts) > self._max_ghosts:
            ghosts.popitem(last=False)

    def reserve(self, owner: str, num_slots: int) -> tuple[list[BlockId], list[BlockId]]:
        """Holds up to so many slots, evicting from others what was there. Returns the slots, and
        those whose content is void now."""
        num_slots = min(num_slots, self.slots.num_available)
        voided: list[BlockId] = []
        lacking = num_slots - self.slots.num_free
        if lacking > 0:
            voided = self.slots.withdraw("evict", lacking)
            self.slots.release("evict")
        reserved = self.slots.allocate(owner, num_slots)
        assert reserved is not None
        return reserved, voided

    def learn(self, keys: Sequence[BlockKey], first_depth: int) -> list[BlockId]:
        """Others have put these, the run of a prompt from `first_depth` on, into a store that is
        shared. Returns the slots whose content is void for that."""
        new = [(depth, key) for depth, key in enumerate(keys, first_depth) if not self.knows(key)]
        slots, voided = self.reserve("learn", len(new))
        for slot, (depth, key) in zip(slots, new, strict=False):
            self.fill(slot, key, depth)
        self.slots.release("learn")
        return voided

    def knows(self, key: BlockKey) -> bool:
        return self.slots.find(key) is not None

    def fill(self, slot: BlockId, key: BlockKey, depth: int) -> bool:
        """A reserved slot is written. False if the block got here by another way meanwhile."""
        self._ghosts.pop(key, None)
        return not self.lost and self.slots.seal(slot, key, depth)

    def lose(self, error: str) -> None:
        """Nothing is on the disk any more; holds end as they would have."""
        self.error = error or "it is gone"
        self.slots.withdraw("lost", self.slots.num_evictable)
        self.slots.release("lost")
        self.slots.forget(self.slots.named())  # those that are being read
        self._ghosts.clear()

    def validate(self) -> None:
        self.slots.validate()
        assert len(self._ghosts) <= self._max_ghosts
        assert not (self.lost and self.slots.num_cached)
