"""Joins the parts of one operation on blocks that several attention workers perform.

Bookkeeping only; the caller guards it with a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class FanInPart:
    """One worker's part: the indices of the operation's blocks that it moves."""

    worker: int
    indices: Sequence[int]


@dataclass(slots=True)
class FanIn:
    """Joins the results of an operation that several workers perform in `parts`, by name. An ended
    part is removed, and the end of the last part ends the operation. An index may belong to several
    parts, because workers share a block by head. Its block is missing if one of these parts failed.
    """

    parts: dict[str, FanInPart]
    error: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    corrupt_slices: int = 0
    _missing: set[int] = field(default_factory=set)
    _total: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.parts
        self._total = len({index for part in self.parts.values() for index in part.indices})

    @property
    def workers(self) -> list[int]:
        """Workers whose parts have not ended."""
        return [part.worker for part in self.parts.values()]

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices that did not arrive, in rising order."""
        return tuple(sorted(self._missing))

    @property
    def num_whole(self) -> int:
        """Number of indices from 0 on before the first missing one."""
        return min(self._missing, default=self._total)

    def indices_of(self, name: str) -> Sequence[int]:
        """Returns the indices of a part that has not ended, or none."""
        part = self.parts.get(name)
        return () if part is None else part.indices

    def count(self, num_bytes: int, seconds: float, corrupt_slices: int = 0) -> None:
        """Adds the bytes, the time and the corrupt slices of one part. Parts run at the same time,
        so the longest time counts."""
        self.num_bytes += num_bytes
        self.seconds = max(self.seconds, seconds)
        self.corrupt_slices += corrupt_slices

    def end(self, name: str, missing: Iterable[int], error: str) -> bool:
        """Ends a part. Returns True if it was the last; an unknown part changes
        nothing."""
        if self.parts.pop(name, None) is None:
            return False
        self._missing.update(missing)
        self.error = self.error or error
        return not self.parts

    def lose(self, worker: int) -> bool:
        """Ends all parts of a lost worker. Returns True if they were the last."""
        ended = False
        for name, part in list(self.parts.items()):
            if part.worker == worker:
                ended = self.end(name, part.indices, "the attention worker is lost")
        return ended
