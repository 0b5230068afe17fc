"""What an arena keeps of each slice, where it does not keep all of it, and how slices cross between
arenas that keep different shares. Knows bytes only, not what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from moonpool.types import Struct

NOWHERE = -1
"""In the place of a block that another arena has."""
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Cut(Struct, frozen=True):
    """Byte ranges (start, end) of a whole slice of `whole_bytes`: ascending, apart, not empty."""

    whole_bytes: _Bytes
    ranges: Annotated[tuple[tuple[_Bytes, _Bytes], ...], msgspec.Meta(min_length=1, max_length=16)]

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def fits(self, whole_bytes: int) -> bool:
        """Whether it is one of slices of so many bytes: it may come from a peer."""
        before = 0
        for start, end in self.ranges:
            if not before <= start < end:
                return False
            before = end
        return before <= whole_bytes == self.whole_bytes

    def of(self, whole: memoryview) -> list[memoryview]:
        """Its ranges of a whole slice."""
        return [whole[start:end] for start, end in self.ranges]


@dataclass(frozen=True, slots=True)
class Passage:
    """`source_bytes`: of a slice in the sender's arena. `pieces`: from where in it, to where in the
    receiver's slice, how many bytes; they travel in this order."""

    source_bytes: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.pieces)


def fit(theirs: Cut | None, ours: Cut | None) -> bool:
    """Whether slices can cross between arenas with these cuts; None: whole slices."""
    return theirs is None or ours is None or theirs == ours


def passage(theirs: Cut | None, ours: Cut | None) -> Passage | None:
    """How slices cross that fit. None: they are alike on both sides."""
    if theirs == ours:
        return None
    cut = theirs or ours
    assert cut is not None
    pieces, packed = [], 0
    for start, end in cut.ranges:
        size = end - start
        pieces.append((start, packed, size) if theirs is None else (packed, start, size))
        packed += size
    return Passage(cut.whole_bytes if theirs is None else packed, tuple(pieces))
