"""One store or load under way: many groups of blocks, several threads, exactly one end. A load may
come in several parts, each some of the layers of all blocks.

under way --last group done--> ended
under way --`abandon`: the disk hangs--> ended, and *hung* while threads are still inside
hung --the last of them comes back--> returned
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Listener(Protocol):
    """Hears how far a job is, until its end is told. Must not block."""

    def parts(self, num_parts: int, seconds: float) -> None:
        """So many parts of all blocks are right; 0: the first thread is at it."""
        ...

    def broken(self) -> None:
        """Some of it will not come."""
        ...


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
        num_parts: int = 1,
        listener: Listener | None = None,
    ) -> None:
        """`num_groups`: of each part."""
        self.keys = keys
        self.slots = slots
        self.block_ids = block_ids
        self._end = end
        self._returned = returned
        self._lock = threading.Lock()
        self._num_parts = num_parts
        self._listener = listener
        self._moved = [0] * len(keys)  # parts of each block
        self._groups_left = [num_groups] * num_parts
        self._whole_parts = 0
        self._moving: dict[tuple[int, int], float] = {}  # a thread is in these groups, since when
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

    def begin_group(self, start: int, part: int = 0) -> bool:
        """Whether blocks from `start` on can still count; if so, a thread is at them from now on,
        until `group_done`."""
        with self._lock:
            now_s = time.monotonic()
            if self._began_s is None:
                self._began_s = now_s
                if self._listener is not None and not self._ended:
                    self._listener.parts(0, 0.0)
            if self._ended or start >= self._first_failed:
                return False
            self._moving[part, start] = now_s
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
        part: int = 0,
    ) -> None:
        """`num_moved` blocks from `start` on are right in this part, of `num_wanted`."""
        with self._lock:
            was_moving = self._moving.pop((part, start), None) is not None
            if self._ended:
                back = was_moving and not self._moving
                outcome = None
            else:
                back = False
                for index in range(start, start + num_moved):
                    self._moved[index] += 1
                if num_moved < num_wanted:
                    self._first_failed = min(self._first_failed, start + num_moved)
                self._num_bytes += num_bytes
                self._corrupt_slices += corrupt_slices
                self._error = self._error or error
                self._groups_left[part] -= 1
                if any(self._groups_left):
                    self._tell(self._listener)
                    return
                self._ended = True
                outcome = self._outcome(hung=False)
        if outcome is not None:
            self._end(outcome)
        elif back and self._returned is not None:
            self._returned()

    def _tell(self, listener: Listener | None) -> None:
        if listener is None:
            return
        if self._first_failed < len(self.keys):
            listener.broken()
            return
        before = self._whole_parts
        while not self._groups_left[self._whole_parts]:
            self._whole_parts += 1
        if self._whole_parts > before and self._began_s is not None:
            listener.parts(self._whole_parts, time.monotonic() - self._began_s)

    def refuse(self, error: str) -> None:
        """Ends it before anything of it was begun."""
        self._end(Outcome(0, 0, 0, 0.0, error))

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
        unmoved = (i for i, parts in enumerate(self._moved) if parts < self._num_parts)
        return Outcome(
            num_blocks=next(unmoved, len(self._moved)),
            corrupt_slices=self._corrupt_slices,
            num_bytes=self._num_bytes,
            seconds=0.0 if self._began_s is None else time.monotonic() - self._began_s,
            error=self._error,
            hung=hung,
        )
