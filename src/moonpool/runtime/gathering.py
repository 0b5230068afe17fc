"""An operation on blocks that several attention workers do together, each its part: what is missing
of it in the end. Bookkeeping only; the caller guards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Part:
    """One worker's: which indices of the operation it has to do with."""

    worker: int
    indices: Sequence[int]


@dataclass(slots=True)
class Gathering:
    """Ends with the last of its `parts`, which are taken out as they end."""

    parts: dict[str, Part]
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
        """Those that are still at it."""
        return [part.worker for part in self.parts.values()]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._missing))

    @property
    def num_whole(self) -> int:
        """Of indices from 0 on, those before the first that is missing."""
        return min(self._missing, default=self._total)

    def indices_of(self, name: str) -> Sequence[int]:
        part = self.parts.get(name)
        return () if part is None else part.indices

    def count(self, num_bytes: int, seconds: float, corrupt_slices: int = 0) -> None:
        self.num_bytes += num_bytes
        self.seconds = max(self.seconds, seconds)
        self.corrupt_slices += corrupt_slices

    def end(self, name: str, missing: Iterable[int], error: str) -> bool:
        """A part has ended; True if it was the last. One that is not known changes nothing."""
        if self.parts.pop(name, None) is None:
            return False
        self._missing.update(missing)
        self.error = self.error or error
        return not self.parts

    def lose(self, worker: int) -> bool:
        """The worker is gone; True if nobody else is at it."""
        ended = False
        for name, part in list(self.parts.items()):
            if part.worker == worker:
                ended = self.end(name, part.indices, "the attention worker is lost")
        return ended
