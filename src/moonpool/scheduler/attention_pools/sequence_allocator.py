"""The interface by which the scheduler allocates blocks for a sequence, wherever its arenas are.

With one arena, any available block serves any sequence. With several (attention offloading), the
blocks a sequence already has decide which arenas its next blocks may come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.types import BlockId


class SequenceAllocator(Protocol):
    """Allocates blocks by sequence. Implemented by `OneArena`, and by `PartitionedPool` and
    `SegmentedPool` for several arenas."""

    @property
    def max_sequence_blocks(self) -> int:
        """The most blocks that one sequence can have."""
        ...

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        """Allocates as `BlockPool.allocate` does, for blocks that continue `sequence`: all blocks
        the sequence has so far, in order."""
        ...

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        """Whether all of these sequences, given by their blocks, could get the given number of
        further blocks together."""
        ...

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        """Whether releasing the blocks of `victim` can make room for `sequence` to grow."""
        ...


class OneArena:
    """The `SequenceAllocator` of a plain `BlockPool`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def max_sequence_blocks(self) -> int:
        return self._pool.num_blocks

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        return self._pool.allocate(owner, num_blocks)

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        return sum(num_blocks for _, num_blocks in extensions) <= self._pool.num_available

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        return True
