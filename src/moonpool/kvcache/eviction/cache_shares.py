"""Evicts blocks of tenants above their share of a pool first, whatever policy is wrapped.

A tenant with a share may have cached blocks up to that share of the pool. While room is left the
tenant may have more blocks. When another request needs room, these blocks are evicted first, in the
order of their release, and the end of a prompt before its beginning. The wrapped policy orders all
other blocks.

The pool knows nothing of tenants. When a request of a tenant with a share caches or finds a block,
`KVCacheManager` assigns the block to the tenant. Without such tenants, each call costs one more
check.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.eviction.policies import EvictionPolicy, WrappedEviction
from moonpool.types import BlockId, BlockKey

MAX_REFUSED = 32
"""Most blocks that the wrapped policy may refuse in one call, so that the time of the call is
bounded."""


@dataclass(slots=True)
class _Part:
    """The cached blocks of one tenant."""

    limit: int
    num_cached: int = 0
    evictable: OrderedDict[BlockId, None] = field(default_factory=OrderedDict)

    @property
    def excess(self) -> int:
        return self.num_cached - self.limit


class CacheShareEviction(WrappedEviction):
    """An `EvictionPolicy` that wraps another policy, for a pool of `num_blocks` blocks."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        super().__init__(policy)
        self._num_blocks = num_blocks
        self._parts: dict[str, _Part] = {}
        # the tenant's part for each cached block of a tenant with a share
        self._part_of: dict[BlockId, _Part] = {}
        # owner of each block, kept until the block is stored again
        self._owner_of: dict[BlockId, tuple[str, float]] = {}

    def assign(self, block_ids: Iterable[BlockId], tenant: str, share: float) -> None:
        """Assigns these held, cached blocks to `tenant`, whose share of the pool is `share`."""
        part = self._parts.get(tenant)
        if part is None:
            part = self._parts[tenant] = _Part(0)
        part.limit = int(share * self._num_blocks)
        for block_id in block_ids:
            assert block_id not in self._policy, "only held blocks"
            if block_id not in self._part_of:
                self._part_of[block_id] = part
                part.num_cached += 1
            self._owner_of[block_id] = tenant, share

    def owner_of(self, block_id: BlockId) -> tuple[str, float] | None:
        """Returns the tenant of a block and the tenant's share, if the block has one. A block that
        lost its key keeps its owner until it has another key."""
        return self._owner_of.get(block_id)

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        if self._owner_of:
            for block_id in block_ids:
                self._owner_of.pop(block_id, None)
        self._policy.store(block_ids, keys, depths)

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        if self._part_of:
            for block_id in reversed(block_ids):
                part = self._part_of.get(block_id)
                if part is not None:
                    part.evictable[block_id] = None
        self._policy.add(block_ids, parent)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        if self._part_of:
            for block_id in block_ids:
                part = self._part_of.get(block_id)
                if part is not None:
                    part.evictable.pop(block_id, None)
        self._policy.remove(block_ids)

    def evict(self, block_id: BlockId) -> bool:
        gone = self._policy.evict(block_id)
        if gone and self._part_of:
            self._end(block_id)
        return gone

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Evicts blocks above a share first, then those that the wrapped policy chooses. Raises
        KeyError if fewer are evictable."""
        if not self._part_of:
            return self._policy.pop(num_blocks)
        if num_blocks > len(self._policy):
            raise KeyError("fewer blocks are evictable")
        popped: list[BlockId] = []
        for part in self._parts.values():
            popped += self._pop_excess(part, num_blocks - len(popped))
        chosen = self._policy.pop(num_blocks - len(popped))
        for block_id in chosen:
            self._end(block_id)
        return popped + chosen

    def validate(self) -> None:
        """Asserts that the counts match the blocks."""
        for part in self._parts.values():
            own = [block_id for block_id, found in self._part_of.items() if found is part]
            assert part.num_cached == len(own)
            assert set(part.evictable) == {b for b in own if b in self._policy}

    def _pop_excess(self, part: _Part, most: int) -> list[BlockId]:
        """Removes and returns up to `most` blocks that the tenant has above its share."""
        popped: list[BlockId] = []
        num_looks = 2 * most + MAX_REFUSED
        while part.evictable and part.excess > 0 and len(popped) < most and num_looks:
            num_looks -= 1
            block_id, _ = part.evictable.popitem(last=False)
            if self._policy.evict(block_id):
                self._end(block_id)
                popped.append(block_id)
            else:  # cached blocks continue this block, so it must stay
                part.evictable[block_id] = None
        return popped

    def _end(self, block_id: BlockId) -> None:
        part = self._part_of.pop(block_id, None)
        if part is not None:
            part.num_cached -= 1
            part.evictable.pop(block_id, None)
