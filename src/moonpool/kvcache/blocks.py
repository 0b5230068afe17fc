"""Who owns which block of one instance's arena. Bookkeeping only: no bytes here.

A block is always in exactly one of three states:

    free     no name, no holder            --allocate-->  held
    held     one or more owners            --release-->   cached if it has a key, else free
    cached   a key, no holder, evictable   --acquire-->   held;  --evicted by allocate--> held anew

Every hold has a named owner (a request, a peer's read), and `release(owner)` ends all of its
holds, so nothing can be forgotten one by one. A sealed block (one with a key) is immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.eviction import Eviction, LruEviction
from moonpool.types import BlockId, BlockKey


@dataclass(slots=True)
class PoolChanges:
    """Names that appeared and vanished since the last `take_changes`, in no particular order."""

    stored: list[BlockKey] = field(default_factory=list)
    removed: list[BlockKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockPool:
    """The blocks 0 .. num_blocks - 1 of one arena."""

    def __init__(self, num_blocks: int, eviction: Eviction | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._evictable: Eviction = eviction if eviction is not None else LruEviction()
        self._num_holds = [0] * num_blocks
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        self._held_by: dict[str, list[BlockId]] = {}
        self._net_changes: dict[BlockKey, bool] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks with a name, held or not."""
        return len(self._key_of)

    def owners(self) -> dict[str, int]:
        """Number of holds of each owner."""
        return {owner: len(blocks) for owner, blocks in self._held_by.items()}

    def keys(self) -> list[BlockKey]:
        return list(self._block_of)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks of the longest run of `keys` held here, from the first key on. Mutates nothing;
        the result is safe only until the next call that allocates: acquire it at once."""
        blocks: list[BlockId] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def acquire(self, owner: str, block_ids: Iterable[BlockId]) -> None:
        """Adds a hold on each block. Mutates."""
        for block_id in block_ids:
            if self._num_holds[block_id] == 0:
                assert block_id in self._evictable, "only named blocks can be acquired"
                self._evictable.remove(block_id)
            self._num_holds[block_id] += 1
            self._held_by.setdefault(owner, []).append(block_id)

    def allocate(self, owner: str, num_blocks: int) -> list[BlockId] | None:
        """Holds `num_blocks` nameless blocks, evicting cached ones if need be; all or nothing."""
        assert num_blocks >= 0
        if num_blocks > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in blocks:
            self._num_holds[block_id] = 1
        if blocks:
            self._held_by.setdefault(owner, []).extend(blocks)
        return blocks

    def seal(self, block_id: BlockId, key: BlockKey) -> bool:
        """Names a held block by its content. False if another block has that name already; then
        this one stays nameless, and is free again when released."""
        assert self._num_holds[block_id] > 0 and block_id not in self._key_of
        if key in self._block_of:
            return False
        self._key_of[block_id] = key
        self._block_of[key] = block_id
        self._note(key, stored=True)
        return True

    def release(self, owner: str) -> None:
        """Ends all holds of `owner` (none is fine). Later blocks of a prefix become evictable
        first, because a block is useless once its predecessor is gone."""
        for block_id in reversed(self._held_by.pop(owner, [])):
            self._num_holds[block_id] -= 1
            if self._num_holds[block_id] > 0:
                continue
            if block_id in self._key_of:
                self._evictable.add(block_id)
            else:
                self._free.append(block_id)

    def take_changes(self) -> PoolChanges:
        """Net changes of names since the last call."""
        changes = PoolChanges()
        for key, stored in self._net_changes.items():
            (changes.stored if stored else changes.removed).append(key)
        self._net_changes.clear()
        return changes

    def validate(self) -> None:
        """Asserts that the sums balance and that every block is in exactly one state."""
        holds = [0] * self.num_blocks
        for blocks in self._held_by.values():
            for block_id in blocks:
                holds[block_id] += 1
        assert holds == self._num_holds
        free = set(self._free)
        assert len(free) == len(self._free)
        for block_id in map(BlockId, range(self.num_blocks)):
            states = (block_id in free, holds[block_id] > 0, block_id in self._evictable)
            assert sum(states) == 1, (block_id, states)
            assert not (states[0] and block_id in self._key_of)
            assert not (states[2] and block_id not in self._key_of)
        assert {b: k for k, b in self._block_of.items()} == self._key_of

    def _evict(self) -> BlockId:
        block_id = self._evictable.pop()
        key = self._key_of.pop(block_id)
        del self._block_of[key]
        self._note(key, stored=False)
        return block_id

    def _note(self, key: BlockKey, stored: bool) -> None:
        # A name that came and went between two reports is no news.
        if self._net_changes.get(key) is (not stored):
            del self._net_changes[key]
        else:
            self._net_changes[key] = stored
