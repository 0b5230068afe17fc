"""Keeps account of one instance's blocks in several arenas. A sequence may lie in many arenas, but
each of its segments lies in one arena.

Attention over a segment is computed in the arena that holds it, so a long sequence has the memory
and the bandwidth of all arenas. A segment is the run of tokens after which attention starts a new
partial result (`engine.ops.SEGMENT`). A new segment goes to the arena with the most room.
This module does bookkeeping only and touches no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.eviction.replica_aware import ReplicaAwareEviction
from moonpool.scheduler.attention_pools.partitions import PartitionedPool
from moonpool.types import BlockId, BlockKey


@dataclass(slots=True)
class _Room:
    """Number of free and of available blocks in one arena."""

    num_free: int
    num_available: int

    def rank(self, size: int, segment_blocks: int) -> tuple[bool, bool, int, int]:
        """Returns a rank of how well `size` blocks fit; larger is better. A segment that is not
        complete yet prefers an arena with room for all of it; evictable blocks only decide between
        arenas that are otherwise equal."""
        free = min(self.num_free, size)
        available = self.num_available
        return available >= size, available >= segment_blocks, free, available

    def take(self, size: int) -> None:
        self.num_free -= min(self.num_free, size)
        self.num_available -= size


class SegmentedPool(PartitionedPool):
    """A `PartitionedPool` whose sequences may lie in several arenas, segment by segment."""

    def __init__(
        self,
        sizes: Sequence[int],
        segment_blocks: int,
        make_eviction: Callable[[int], ReplicaAwareEviction] | None = None,
    ) -> None:
        assert segment_blocks > 0
        super().__init__(sizes, make_eviction)
        self.segment_blocks = segment_blocks

    @property
    def max_sequence_blocks(self) -> int:
        """Returns the blocks of the whole segments of all arenas, plus the largest remainder of one
        arena."""
        rests = [size % self.segment_blocks for size in self.sizes]
        return sum(self.sizes) - sum(rests) + max(rests)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Returns, for each segment, the longest run from its start that one arena has. Ends at the
        first gap."""
        found: list[BlockId] = []
        for first in range(0, len(keys), self.segment_blocks):
            segment = keys[first : first + self.segment_blocks]
            run = super().match(segment)
            found += run
            if len(run) < len(segment):
                break
        return found

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        room = self._room_now()
        return all(
            self._places(sequence, num_blocks, room) is not None
            for sequence, num_blocks in extensions
        )

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        if not victim or not self._left_of_segment(sequence):
            return True
        arena = self.arena_of(sequence[-1])
        return any(self.arena_of(block_id) == arena for block_id in victim)

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        places = self._places(sequence, num_blocks, self._room_now())
        if places is None:
            return None
        found: list[BlockId] = []
        for arena, size in places:
            blocks = self._pools[arena].allocate(owner, size)
            assert blocks is not None, "there was room"
            found += [BlockId(b + self._starts[arena]) for b in blocks]
        return found

    def _places(
        self, sequence: Sequence[BlockId], num_blocks: int, room: list[_Room]
    ) -> list[tuple[int, int]] | None:
        """Returns the arena and number of blocks for each segment that the new blocks begin or
        continue, in order, and subtracts these blocks from `room`. Returns None if the blocks do
        not fit."""
        begun = min(num_blocks, self._left_of_segment(sequence))
        whole, rest = divmod(num_blocks - begun, self.segment_blocks)
        wanted = [(self.arena_of(sequence[-1]), begun)] if begun else []
        wanted += [(-1, self.segment_blocks)] * whole + ([(-1, rest)] if rest else [])
        places: list[tuple[int, int]] = []
        for arena, size in wanted:
            if arena < 0:
                ranks = [own.rank(size, self.segment_blocks) for own in room]
                arena = ranks.index(max(ranks))
            if room[arena].num_available < size:
                return None
            room[arena].take(size)
            places.append((arena, size))
        return places

    def _room_now(self) -> list[_Room]:
        return [
            _Room(0, 0) if lost else _Room(pool.num_free, pool.num_available)
            for pool, lost in zip(self._pools, self._lost, strict=True)
        ]

    def _left_of_segment(self, sequence: Sequence[BlockId]) -> int:
        """Returns how many blocks the last segment of the sequence lacks."""
        return -len(sequence) % self.segment_blocks
