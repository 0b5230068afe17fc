"""One instance's blocks in several arenas, where one sequence may lie in many: segment by segment,
each in one arena, so that a long one has the room and the bandwidth of all.

A segment is so many tokens that attention begins anew after it; a new one goes where most room is.
Bookkeeping only: no bytes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonpool.kvcache.partitions import PartitionedPool
from moonpool.kvcache.spare_first import SpareFirst
from moonpool.types import BlockId, BlockKey


@dataclass(slots=True)
class _Room:
    """Of an arena."""

    num_free: int
    num_available: int

    def rank(self, size: int, segment_blocks: int) -> tuple[bool, bool, int, int]:
        """Rather where all of a segment that is only begun would fit; names count as room only
        between equals."""
        free = min(self.num_free, size)
        available = self.num_available
        return available >= size, available >= segment_blocks, free, available

    def take(self, size: int) -> None:
        self.num_free -= min(self.num_free, size)
        self.num_available -= size


class SegmentedPool(PartitionedPool):
    """`beside`, where blocks are asked for, are all blocks of the sequence so far."""

    def __init__(
        self,
        sizes: Sequence[int],
        segment_blocks: int,
        make_eviction: Callable[[int], SpareFirst] | None = None,
    ) -> None:
        assert segment_blocks > 0
        super().__init__(sizes, make_eviction)
        self.segment_blocks = segment_blocks

    @property
    def largest(self) -> int:
        """Whole segments in all arenas, and what is left of one."""
        rests = [size % self.segment_blocks for size in self.sizes]
        return sum(self.sizes) - sum(rests) + max(rests)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Of each segment what one arena has of it from its start on, up to the first gap."""
        found: list[BlockId] = []
        for first in range(0, len(keys), self.segment_blocks):
            segment = keys[first : first + self.segment_blocks]
            run = super().match(segment)
            found += run
            if len(run) < len(segment):
                break
        return found

    def has_room(self, needs: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        room = self._room_now()
        return all(
            self._places(block_ids, num_blocks, room) is not None for block_ids, num_blocks in needs
        )

    def together(self, one: Sequence[BlockId], other: Sequence[BlockId]) -> bool:
        if not one or not self._left_of_segment(other):
            return True
        part = self.part_of(other[-1])
        return any(self.part_of(block_id) == part for block_id in one)

    def allocate(
        self, owner: str, num_blocks: int, beside: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        places = self._places(beside, num_blocks, self._room_now())
        if places is None:
            return None
        found: list[BlockId] = []
        for part, size in places:
            blocks = self._parts[part].allocate(owner, size)
            assert blocks is not None, "there was room"
            found += [BlockId(b + self._starts[part]) for b in blocks]
        return found

    def _places(
        self, beside: Sequence[BlockId], num_blocks: int, room: list[_Room]
    ) -> list[tuple[int, int]] | None:
        """In which arenas how many go, in order (`room` is less by that); None: they do not fit."""
        begun = min(num_blocks, self._left_of_segment(beside))
        whole, rest = divmod(num_blocks - begun, self.segment_blocks)
        wanted = [(self.part_of(beside[-1]), begun)] if begun else []
        wanted += [(-1, self.segment_blocks)] * whole + ([(-1, rest)] if rest else [])
        places: list[tuple[int, int]] = []
        for part, size in wanted:
            if part < 0:
                ranks = [own.rank(size, self.segment_blocks) for own in room]
                part = ranks.index(max(ranks))
            if room[part].num_available < size:
                return None
            room[part].take(size)
            places.append((part, size))
        return places

    def _room_now(self) -> list[_Room]:
        return [
            _Room(0, 0) if lost else _Room(pool.num_free, pool.num_available)
            for pool, lost in zip(self._parts, self._lost, strict=True)
        ]

    def _left_of_segment(self, block_ids: Sequence[BlockId]) -> int:
        """Blocks that belong beside the last of these."""
        return -len(block_ids) % self.segment_blocks
