"""What an SSD store has moved so far. Added to by its threads, read by its worker for /metrics."""

from __future__ import annotations

import threading

from moonpool.types import Struct


class StoreCounts(Struct, frozen=True):
    """A copy of the counters at one moment. Seconds are those of the threads, summed."""

    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    corrupt_slices: int = 0
    failed_operations: int = 0


class StoreCounters:
    """Thread-safe sums; never reset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = StoreCounts()

    def add(self, more: StoreCounts) -> None:
        with self._lock:
            sums = {
                name: getattr(self._sums, name) + getattr(more, name)
                for name in StoreCounts.__struct_fields__
            }
            self._sums = StoreCounts(**sums)

    def counts(self) -> StoreCounts:
        with self._lock:
            return self._sums
