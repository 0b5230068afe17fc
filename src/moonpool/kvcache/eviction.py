"""Which cached blocks go first when room is needed. Chooses only among blocks that nobody holds.

A policy is told what the pool sees, in the pool's words, and keeps its own books from it:

    store   held blocks got their names, each at its place in its prompt
    touch   named blocks are used again, a prompt's in order
    remove  evictable blocks are held again
    add     blocks lost their last holder and are evictable from now on
    pop     room is needed
    evict   one block is not needed, whatever the policy thinks of it
    forget  a named block's content is void

It reads no clock: time is what went through the cache. A policy's memory is bounded by a small
multiple of the pool's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.kvcache.length_aware import LengthAwareEviction
from moonpool.kvcache.lfu import LfuEviction
from moonpool.kvcache.lru import LruEviction
from moonpool.kvcache.predictive import PredictiveEviction
from moonpool.types import BlockId, BlockKey


class Eviction(Protocol):
    """Order of the evictable blocks. Every method mutates, but `__len__` and `__contains__`."""

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        """Held blocks have these names from now on; each is the so many-th block of its prompt."""
        ...

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """Blocks with names are used again, evictable until now or not."""
        ...

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        """A run of one prompt's blocks, in its order, was let go by its last holder. `parent` is
        the block before the first, where that one stays for the time being."""
        ...

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Evictable blocks are held again. Raises KeyError if one was not evictable."""
        ...

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Removes and returns the blocks to evict, in order; they lose their names. Raises KeyError
        if there are not so many."""
        ...

    def evict(self, block_id: BlockId) -> bool:
        """Takes this evictable block, as if `pop` had chosen it; False, changing nothing, if it
        must stay because of what continues it."""
        ...

    def forget(self, block_id: BlockId) -> None:
        """A named block, evictable or not, loses its name without having been chosen for it."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...


def make_eviction(name: str, num_blocks: int) -> Eviction:
    """The policy that the configuration calls `name`, for a pool of `num_blocks`."""
    match name:
        case "lru":
            return LruEviction()
        case "lfu":
            return LfuEviction()
        case "length-aware":
            return LengthAwareEviction()
        case "predictive":
            return PredictiveEviction(num_blocks)
    raise ValueError(f"unknown eviction {name!r}; known are lru, lfu, length-aware and predictive")
