"""One store or load under way: many groups of blocks, several threads, exactly one end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_blocks`: so many from the first on were moved whole and right."""

    num_blocks: int
    corrupt_slices: int
    num_bytes: int
    seconds: float
    error: str


class Job:
    """`end` is called once, by the thread that finishes the last group. Thread-safe."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        num_groups: int,
        end: Callable[[Outcome], None],
    ) -> None:
        self.keys = keys
        self.slots = slots
        self.block_ids = block_ids
        self._end = end
        self._lock = threading.Lock()
        self._moved = bytearray(len(keys))
        self._groups_left = num_groups
        self._first_failed = len(keys)
        self._corrupt_slices = 0
        self._num_bytes = 0
        self._began_s: float | None = None
        self._error = ""

    def wanted(self, start: int) -> bool:
        """Asked before a group is begun: whether blocks from `start` on can still count."""
        with self._lock:
            if self._began_s is None:
                self._began_s = time.monotonic()
            return start < self._first_failed

    def group_done(
        self,
        start: int,
        num_moved: int,
        num_wanted: int,
        num_bytes: int = 0,
        corrupt_slices: int = 0,
        error: str = "",
    ) -> None:
        """`num_moved` blocks from `start` on are whole and right, of `num_wanted`."""
        with self._lock:
            self._moved[start : start + num_moved] = bytes([1]) * num_moved
            if num_moved < num_wanted:
                self._first_failed = min(self._first_failed, start + num_moved)
            self._num_bytes += num_bytes
            self._corrupt_slices += corrupt_slices
            self._error = self._error or error
            self._groups_left -= 1
            if self._groups_left > 0:
                return
            outcome = self._outcome()
        self._end(outcome)

    def _outcome(self) -> Outcome:
        gap = self._moved.find(0)
        return Outcome(
            num_blocks=len(self._moved) if gap < 0 else gap,
            corrupt_slices=self._corrupt_slices,
            num_bytes=self._num_bytes,
            seconds=0.0 if self._began_s is None else time.monotonic() - self._began_s,
            error=self._error,
        )
