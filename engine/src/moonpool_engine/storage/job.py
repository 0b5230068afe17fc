"""One store or load operation: many groups of blocks, several threads, exactly one end.

    running --last group done--> ended
    running --`abandon`: the disk hangs--> ended, and *hung* while threads are still in a call
    hung --the last of them returns--> returned

A load may come in several parts, each some layers of all its blocks, so that a prefill computes
with the first layers while the others are read (Mooncake 5.2). `split_layers` decides which layers
form a part, `LayeredLoad` holds what the parts of one load share, and `LoadProgressReporter`
reports the progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moonpool.protocol.transfer_events import LoadEnded, LoadProgress, MessengerEvent, StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.format import PAGE_BYTES, Geometry, SlotHeader
from moonpool_engine.transfer.gate import PROGRESS_PARTS, LayerGate

MIN_PART_BYTES = 512 << 10
"""Least bytes of a block per part, because smaller reads are slower than a read of the whole
block."""
_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """`num_blocks`: the number of leading blocks that were moved completely and verified. `hung`:
    whether a thread may still access the other blocks until the job has returned."""

    num_blocks: int
    corrupt_slices: int
    num_bytes: int
    seconds: float
    error: str
    hung: bool = False

    def as_store_ended(self, store_id: str) -> StoreEnded:
        return StoreEnded(
            store_id=store_id,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            error=self.error,
            hung=self.hung,
        )

    def as_load_ended(self, load_id: str) -> LoadEnded:
        return LoadEnded(
            load_id=load_id,
            num_blocks=self.num_blocks,
            corrupt_slices=self.corrupt_slices,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            error=self.error,
            hung=self.hung,
        )


class JobListener(Protocol):
    """Gets the progress of a job until its end. Its methods must not block."""

    def parts_done(self, num_parts: int, seconds: float) -> None:
        """Called when the first `num_parts` parts of all blocks are verified; 0 means that the
        first thread has started."""
        ...

    def broken(self) -> None:
        """Called when some blocks cannot be read, maybe several times."""
        ...


class Job:
    """`end` is called once, by the thread that finishes the last group or abandons the job.
    `returned` is called once after a hung end, which only `abandon` causes. Thread-safe."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        num_groups: int,
        end: Callable[[JobOutcome], None],
        returned: Callable[[], None] | None = None,
        num_parts: int = 1,
        listener: JobListener | None = None,
    ) -> None:
        """`num_groups`: number of groups per part."""
        self.keys = keys
        self.slots = slots
        self.block_ids = block_ids
        self._end = end
        self._returned = returned
        self._lock = threading.Lock()
        self._num_parts = num_parts
        self._listener = listener
        self._moved = [0] * len(keys)  # number of finished parts of each block
        self._groups_left = [num_groups] * num_parts
        self._whole_parts = 0
        # (group, part) -> start time of its running thread
        self._moving: dict[tuple[int, int], float] = {}
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
        """Starts the group of blocks from `start` on, which ends with `group_done`. Returns False
        if the job has ended for these blocks, so that the caller must not move them."""
        with self._lock:
            now_s = time.monotonic()
            if self._began_s is None:
                self._began_s = now_s
                if self._listener is not None and not self._ended:
                    self._listener.parts_done(0, 0.0)
            if self._ended or start >= self._first_failed:
                return False
            self._moving[part, start] = now_s
            return True

    def moving_since_s(self) -> float | None:
        """Returns when the longest-running group began, or None if none runs."""
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
        """Notes that the first `num_moved` of the group's `num_wanted` blocks are verified in this
        part."""
        with self._lock:
            was_moving = self._moving.pop((part, start), None) is not None
            if self._ended:
                is_last = was_moving and not self._moving
                outcome = None
            else:
                is_last = False
                for index in range(start, start + num_moved):
                    self._moved[index] += 1
                if num_moved < num_wanted:
                    self._first_failed = min(self._first_failed, start + num_moved)
                self._num_bytes += num_bytes
                self._corrupt_slices += corrupt_slices
                self._error = self._error or error
                self._groups_left[part] -= 1
                if any(self._groups_left):
                    self._report_progress(self._listener)
                    return
                self._ended = True
                outcome = self._outcome(hung=False)
        if outcome is not None:
            self._end(outcome)
        elif is_last and self._returned is not None:
            self._returned()

    def _report_progress(self, listener: JobListener | None) -> None:
        if listener is None:
            return
        if self._first_failed < len(self.keys):
            listener.broken()
            return
        before = self._whole_parts
        while not self._groups_left[self._whole_parts]:
            self._whole_parts += 1
        if self._whole_parts > before and self._began_s is not None:
            listener.parts_done(self._whole_parts, time.monotonic() - self._began_s)

    def refuse(self, error: str) -> None:
        """Ends the job before any group has started."""
        self._end(JobOutcome(0, 0, 0, 0.0, error))

    def abandon(self, error: str) -> None:
        """Ends the job now, with the blocks moved so far. Ignored if it has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._error = self._error or error
            # Reported under the lock: `returned` of a thread that returns now must come after.
            self._end(self._outcome(hung=bool(self._moving)))

    def _outcome(self, hung: bool) -> JobOutcome:
        unmoved = (i for i, parts in enumerate(self._moved) if parts < self._num_parts)
        return JobOutcome(
            num_blocks=next(unmoved, len(self._moved)),
            corrupt_slices=self._corrupt_slices,
            num_bytes=self._num_bytes,
            seconds=0.0 if self._began_s is None else time.monotonic() - self._began_s,
            error=self._error,
            hung=hung,
        )


class LayerRange(NamedTuple):
    """Layers `first` to `end` - 1."""

    first: int
    end: int


def split_layers(geometry: Geometry) -> tuple[LayerRange, ...]:
    """Returns the parts of each block, of about equal size. If blocks are whole pages, parts are
    whole pages, too."""
    layers, size = geometry.num_layers, geometry.slice_bytes
    num_parts = max(1, min(PROGRESS_PARTS, layers, geometry.block_bytes // MIN_PART_BYTES))
    ends = [layers * (part + 1) // num_parts for part in range(num_parts)]
    if not geometry.padding_bytes:
        ends = [end for end in ends if end * size % PAGE_BYTES == 0]
    return tuple(LayerRange(first, end) for first, end in zip([0, *ends], ends, strict=False))


class LayeredLoad:
    """The block headers of one load, shared by its parts. Thread-safe.

    A header holds the checksums of the block's slices and is read with the first part. A thread
    that has read a later part waits for the headers."""

    def __init__(self, num_blocks: int, starts: Sequence[int]) -> None:
        """`starts`: number of the first block of each group."""
        self.headers: list[SlotHeader | None] = [None] * num_blocks
        self._headers_read = {start: threading.Event() for start in starts}

    def mark_headers_read(self, start: int) -> None:
        """Notes that the headers of the group from `start` on were read, or cannot be read."""
        self._headers_read[start].set()

    def await_headers(self, start: int, job: Job) -> None:
        """Waits for the group's headers. The first part is started before the others, so the wait
        ends with it."""
        while not self._headers_read[start].wait(_RECHECK_S) and not job.ended:
            pass


class LoadProgressReporter:
    """Opens the gate and posts LoadProgress for all but the last layers; the end of the load opens
    the gate for the last ones."""

    def __init__(
        self,
        load_id: str,
        parts: Sequence[LayerRange],
        gate: LayerGate,
        post: Callable[[MessengerEvent], None],
    ) -> None:
        self._load_id = load_id
        self._parts = parts
        self._gate = gate
        self._post = post

    def parts_done(self, num_parts: int, seconds: float) -> None:
        num_layers = self._parts[num_parts - 1].end if num_parts else 0
        self._gate.open(num_layers)
        self._post(LoadProgress(self._load_id, num_layers, seconds))

    def broken(self) -> None:
        self._gate.break_gate()
