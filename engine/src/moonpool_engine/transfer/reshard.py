"""Arenas that store only part of each slice, and the copy plan between arenas that store different
parts. This module works on byte ranges and does not know what they contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from moonpool.types import Struct

NOWHERE = -1
"""Stands in a list of block ids for a block that another arena stores."""
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class ShardView(Struct, frozen=True):
    """The byte ranges (start, end) that an arena stores of each whole slice of `whole_bytes`.
    Ranges ascend, do not touch and are not empty."""

    whole_bytes: _Bytes
    ranges: Annotated[tuple[tuple[_Bytes, _Bytes], ...], msgspec.Meta(min_length=1, max_length=16)]

    @property
    def num_bytes(self) -> int:
        """Bytes stored of each slice."""
        return sum(end - start for start, end in self.ranges)

    def fits(self, whole_bytes: int) -> bool:
        """Whether this view is valid for slices of `whole_bytes`. The view may come from a peer."""
        before = 0
        for start, end in self.ranges:
            if not before <= start < end:
                return False
            before = end
        return before <= whole_bytes == self.whole_bytes

    def of(self, whole: memoryview) -> list[memoryview]:
        """Returns this view's ranges of a whole slice."""
        return [whole[start:end] for start, end in self.ranges]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How to copy one slice between arenas that store different parts of it.

    `source_bytes`: size of the slice in the sender's arena. `pieces`: (offset in the sender's
    slice, offset in the receiver's slice, bytes), in the order in which they are sent."""

    source_bytes: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes sent of each slice."""
        return sum(size for _, _, size in self.pieces)


def compatible(theirs: ShardView | None, ours: ShardView | None) -> bool:
    """Whether slices can be copied between arenas with these views. None stands for whole
    slices."""
    return theirs is None or ours is None or theirs == ours


def reshard_plan(theirs: ShardView | None, ours: ShardView | None) -> ReshardPlan | None:
    """Returns the copy plan between compatible views, or None if both sides store the same."""
    if theirs == ours:
        return None
    view = theirs or ours
    assert view is not None
    pieces, packed = [], 0
    for start, end in view.ranges:
        size = end - start
        pieces.append((start, packed, size) if theirs is None else (packed, start, size))
        packed += size
    return ReshardPlan(view.whole_bytes if theirs is None else packed, tuple(pieces))
