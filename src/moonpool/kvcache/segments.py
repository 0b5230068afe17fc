"""One instance's blocks in several arenas, where one sequence may lie in many: segment by segment,
each in one arena, so that a long one has the room and the bandwidth of all.

A segment is so many tokens that attention begins anew after it; a new one goes where most room is.
Bookkeeping only: no bytes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moonpool.kvcache.partitions import PartitionedPool
from moonpool.kvcache.spare_first import SpareFirst
from moonpool.types import BlockId, BlockKey


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
        """Never wrong when it says so; may deny what would just fit."""
        lacking = [0] * len(self._parts)
        anywhere = 0
        for block_ids, num_blocks in needs:
            begun = min(num_blocks, self._left_of_segment(block_ids))
            if begun:
                lacking[self.part_of(block_ids[-1])] += begun
            anywhere += num_blocks - begun
        return all(
            (lost and not lacks) or (not lost and lacks + anywhere <= pool.num_available)
            for lacks, lost, pool in zip(lacking, self._lost, self._parts, strict=True)
        ) and (not anywhere or not all(self._lost))

    def together(self, one: Sequence[BlockId], other: Sequence[BlockId]) -> bool:
        if not one or not self._left_of_segment(other):
            return True
        part = self.part_of(other[-1])
        return any(self.part_of(block_id) == part for block_id in one)

    def allocate(
        self, owner: str, num_blocks: int, beside: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        begun = min(num_blocks, self._left_of_segment(beside))
        found = super().allocate(owner, begun, beside) if begun else []
        while found is not None and len(found) < num_blocks:
            size = min(self.segment_blocks, num_blocks - len(found))
            part = max(range(len(self._parts)), key=lambda p: self._room_for_segment(p, size))
            blocks = None if self._lost[part] else self._parts[part].allocate(owner, size)
            if blocks is None:
                self.release_some(owner, found)
                return None
            found += [BlockId(b + self._starts[part]) for b in blocks]
        return found

    def _left_of_segment(self, block_ids: Sequence[BlockId]) -> int:
        """Blocks that belong beside the last of these."""
        return -len(block_ids) % self.segment_blocks

    def _room_for_segment(self, part: int, size: int) -> tuple[bool, bool, int, int, int]:
        """As for sequences; and rather where all of a segment that is only begun would fit."""
        fits, *rest = self._room(part, size)
        grows = self._parts[part].num_available >= self.segment_blocks
        return (fits, grows, *rest)  # type: ignore[return-value]
