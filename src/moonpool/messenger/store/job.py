"""One store or load under way: many groups of blocks, several threads, exactly one end.

under way --last group done--> ended
under way --`abandon`: the disk hangs--> ended, and *hung* while threads are still inside
hung --the last of them comes back--> returned
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.kvcache.transfers import LoadEnded, StoreEnded
from moonpool.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_blocks`: so many from the first on were moved whole and right. `hung`: a thread may
    still touch the others, until the job has returned."""

    num_blocks: int
    corrupt_slices: int
    num_bytes: int
    seconds: float
    error: str
    hung: bool = False

    def of_store(self, store_id: str) -> StoreEnded:
        return StoreEnded(
            store_id=store_id,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            error=self.error,
            hung=self.hung,
        )

    def of_load(self, load_id: str) -> LoadEnded:
        return LoadEnded(
            load_id=load_id,
            num_blocks=self.num_blocks,
            corrupt_slices=self.corrupt_slices,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            error=self.error,
            hung=self.hung,
        )


class Job:
    """`end` is called once, by the thread that finishes the last group or abandons the job;
    `returned` once after an end that was hung, which needs someone to `abandon` it. Thread-safe."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        num_groups: int,
        end: Callable[[Outcome], None],
        returned: Callable[[], None] | None = None,
    ) -> None:
        self.keys = keys
        self.slots = slots
        self.block_ids = block_ids
        self._end = end
        self._returned = returned
        self._lock = threading.Lock()
        self._moved = bytearray(len(keys))
        self._groups_left = num_groups
        self._moving: dict[int, float] = {}  # groups that a thread is in, and since when
        self._ended = False
        self._first_failed = len(keys)
        self._corrupt_slices = 0
        self._num_bytes = 0
        self._began_s: float | None = None
        self._error = ""

    @property
    def ended(self) -> bool:
        with self._lock:
            return self._ended

    def begin_group(self, start: int) -> bool:
        """Whether blocks from `start` on can still count; if so, a thread is at them from now on,
        until `group_done`."""
        with self._lock:
            now_s = time.monotonic()
            if self._began_s is None:
                self._began_s = now_s
            if self._ended or start >= self._first_failed:
                return False
            self._moving[start] = now_s
            return True

    def moving_since_s(self) -> float | None:
        """When the group began that a thread is in for the longest time."""
        with self._lock:
            return min(self._moving.values(), default=None)

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
            was_moving = self._moving.pop(start, None) is not None
            if self._ended:
                back = was_moving and not self._moving
                outcome = None
            else:
                back = False
                self._moved[start : start + num_moved] = bytes([1]) * num_moved
                if num_moved < num_wanted:
                    self._first_failed = min(self._first_failed, start + num_moved)
                self._num_bytes += num_bytes
                self._corrupt_slices += corrupt_slices
                self._error = self._error or error
                self._groups_left -= 1
                if self._groups_left > 0:
                    return
                self._ended = True
                outcome = self._outcome(hung=False)
        if outcome is not None:
            self._end(outcome)
        elif back and self._returned is not None:
            self._returned()

    def abandon(self, error: str) -> None:
        """Ends it now, with what has been moved. Nothing if it has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._error = self._error or error
            # Told under the lock: a thread that comes back right now must be heard of after it.
            self._end(self._outcome(hung=bool(self._moving)))

    def _outcome(self, hung: bool) -> Outcome:
        gap = self._moved.find(0)
        return Outcome(
            num_blocks=len(self._moved) if gap < 0 else gap,
            corrupt_slices=self._corrupt_slices,
            num_bytes=self._num_bytes,
            seconds=0.0 if self._began_s is None else time.monotonic() - self._began_s,
            error=self._error,
            hung=hung,
        )
