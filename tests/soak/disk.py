"""Injects disk faults at the lowest calls that the store makes: a full disk and a hanging disk."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from moonpool_engine.storage.folder import segment_path
from moonpool_engine.storage.format import Geometry


class FaultyDisk:
    """Replaces the system's calls in this process permanently."""

    def __init__(self, seed: int) -> None:
        self.full = False
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._hang_until_s = 0.0
        self._pwritev, self._pwrite = os.pwritev, os.pwrite
        self._fallocate, self._preadv = os.posix_fallocate, os.preadv
        os.pwritev = self._write_vector  # type: ignore[assignment]
        os.pwrite = self._write  # type: ignore[assignment]
        os.posix_fallocate = self._reserve  # type: ignore[assignment]
        os.preadv = self._read  # type: ignore[assignment]

    def hang(self, seconds: float) -> None:
        self._hang_until_s = time.monotonic() + seconds

    def flip(self, folder: Path, geometry: Geometry, slot: int) -> None:
        """Flips one bit of the slot, in a way that its reader cannot detect from the page cache."""
        path = segment_path(folder, slot // geometry.slots_per_segment)
        with self._lock, path.open("r+b", buffering=0) as file:
            within = geometry.header_bytes + self._rng.randrange(geometry.block_bytes)
            offset = geometry.offset(slot) + within
            (byte,) = os.pread(file.fileno(), 1, offset)
            self._pwrite(file.fileno(), bytes([byte ^ 1 << self._rng.randrange(8)]), offset)
            os.fdatasync(file.fileno())

    def _refuse(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _wait(self) -> None:
        """Blocks while the disk hangs, like a call in the kernel."""
        while (left_s := self._hang_until_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def _write_vector(self, fd: int, buffers: Sequence[bytes], offset: int) -> int:
        self._wait()
        if not self.full:
            return self._pwritev(fd, buffers, offset)
        if self._rng.random() < 0.5:
            self._refuse()
        # A disk with room for a part of the data writes that part.
        return self._pwritev(fd, buffers[: len(buffers) // 2], offset)

    def _write(self, fd: int, data: bytes, offset: int) -> int:
        if self.full:
            self._refuse()
        return self._pwrite(fd, data, offset)

    def _reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        if self.full:
            self._refuse()
        self._fallocate(fd, offset, num_bytes)

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait()
        return self._preadv(fd, buffers, offset)
