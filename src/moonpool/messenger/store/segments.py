"""The segment files: moves whole slots between them and memory, one system call for neighbours.

With O_DIRECT where the file system and the block's size allow it, so that the page cache does not
hold again what the arena was emptied for; elsewhere through the page cache, which is told to let
go. A segment's space is reserved when the first of its slots is written. Thread-safe; knows
nothing of keys or checksums.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from moonpool.messenger.store.folder import segment_path, segments_in
from moonpool.messenger.store.format import Geometry


class Segments:
    """Of one folder. Buffers must be whole pages at page boundaries where `direct` is True."""

    def __init__(self, folder: Path, geometry: Geometry, num_slots: int, direct: bool) -> None:
        self.direct = direct
        self._folder = folder
        self.geometry = geometry
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._reserved_bytes: dict[int, int] = {}

    def trim(self) -> None:
        """Deletes segments past the last slot: the tier was larger once."""
        for number, path in segments_in(self._folder).items():
            if number * self.geometry.slots_per_segment >= self._num_slots:
                path.unlink(missing_ok=True)

    def missing_bytes(self) -> int:
        """What the disk must still give until every slot has its place."""
        wanted = self._num_slots * self.geometry.slot_bytes
        there = sum(path.stat().st_blocks * 512 for path in segments_in(self._folder).values())
        return max(0, wanted - there)

    def write(self, first_slot: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Fills slots from `first_slot` on, all of one segment. Raises OSError."""
        geometry = self.geometry
        segment = first_slot // geometry.slots_per_segment
        offset = geometry.offset(first_slot)
        wanted = sum(map(len, buffers))
        fd = self._writable(segment, offset + wanted)
        if os.pwritev(fd, buffers, offset) != wanted:
            raise OSError(errno.EIO, "the disk took only part of a block")
        self._let_go(fd, offset, wanted)

    def read(self, first_slot: int, buffers: Sequence[memoryview], skip_bytes: int = 0) -> int:
        """Fills the buffers from so many bytes after the begin of `first_slot` on, and returns how
        many there were: fewer, or none, where the segment is cut off or gone. Raises OSError."""
        geometry = self.geometry
        offset = geometry.offset(first_slot) + skip_bytes
        try:
            fd = self._open(first_slot // geometry.slots_per_segment, create=False)
        except FileNotFoundError:
            return 0
        got = os.preadv(fd, buffers, offset)
        self._let_go(fd, offset, got)
        return got

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _let_go(self, fd: int, offset: int, num_bytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def _open(self, segment: int, create: bool) -> int:
        with self._lock:
            fd = self._fds.get(segment)
            if fd is None:
                flags = os.O_RDWR | os.O_CLOEXEC
                flags |= (os.O_CREAT if create else 0) | (os.O_DIRECT if self.direct else 0)
                fd = os.open(segment_path(self._folder, segment), flags, 0o600)
                self._fds[segment] = fd
                self._reserved_bytes[segment] = os.fstat(fd).st_size
        return fd

    def _writable(self, segment: int, end_bytes: int) -> int:
        fd = self._open(segment, create=True)
        with self._lock:
            if self._reserved_bytes[segment] < end_bytes:
                slots_before = segment * self.geometry.slots_per_segment
                slots = min(self.geometry.slots_per_segment, self._num_slots - slots_before)
                size = max(end_bytes, slots * self.geometry.slot_bytes)
                self._reserve(fd, self._reserved_bytes[segment], size)
                self._reserved_bytes[segment] = size
        return fd

    @staticmethod
    def _reserve(fd: int, old_bytes: int, new_bytes: int) -> None:
        try:
            os.posix_fallocate(fd, old_bytes, new_bytes - old_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, old_bytes)  # gives back what a full disk could still give
            raise
