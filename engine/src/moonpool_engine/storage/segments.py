"""Disk access: the segment files of one instance's folder, and a probe of what the disk can do.

Blocks are moved between segments and memory slot by slot, one system call for adjacent slots. Files
are opened with O_DIRECT if the file system and the block size allow it, so that the page cache
keeps no second copy; otherwise the pages are dropped from the page cache afterwards. A segment's
space is reserved when the first of its slots is written. This module knows neither keys nor
checksums.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonpool.types import MALFORMED, Struct
from moonpool_engine.storage.folder import StoreError, segment_path, segments_in
from moonpool_engine.storage.format import PAGE_BYTES, Geometry

PROBE_NAME = "probe"
_PROBE_BYTES = 8 << 20
_PROBE_STEP_BYTES = 4 << 20
_PROBE_PASSES = 3
_KEPT_S = 7 * 86400.0
_MOST_KEPT_BYTES = 1 << 12


class Segments:
    """The segment files of one folder. Thread-safe. With `direct`, buffers must consist of whole
    pages at page boundaries."""

    def __init__(self, folder: Path, geometry: Geometry, num_slots: int, direct: bool) -> None:
        self.direct = direct
        self._folder = folder
        self.geometry = geometry
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._reserved_bytes: dict[int, int] = {}

    def trim(self) -> None:
        """Deletes segments past the last slot, left by a larger tier."""
        for number, path in segments_in(self._folder).items():
            if number * self.geometry.slots_per_segment >= self._num_slots:
                path.unlink(missing_ok=True)

    def missing_bytes(self) -> int:
        """Returns the disk space that is not allocated yet for all slots."""
        wanted = self._num_slots * self.geometry.slot_bytes
        there = sum(path.stat().st_blocks * 512 for path in segments_in(self._folder).values())
        return max(0, wanted - there)

    def check_space(self) -> None:
        """Raises StoreError if the disk lacks the space for all slots."""
        missing_bytes = self.missing_bytes()
        status = os.statvfs(self._folder)
        free_bytes = status.f_bavail * status.f_frsize
        if missing_bytes > free_bytes:
            gib = float(1 << 30)
            fit = self._num_slots - -(-(missing_bytes - free_bytes) // self.geometry.slot_bytes)
            raise StoreError(
                f"the disk of {self._folder} is full: the SSD tier needs"
                f" {missing_bytes / gib:.2f} GiB more and only {free_bytes / gib:.2f} GiB are free;"
                " free some space, or lower pool.ssd_tokens_per_instance to"
                f" {fit / self._num_slots:.0%} of what it is"
            )

    def write(self, first_slot: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Writes slots from `first_slot` on, all of one segment. Raises OSError."""
        geometry = self.geometry
        segment = first_slot // geometry.slots_per_segment
        offset = geometry.offset(first_slot)
        wanted = sum(map(len, buffers))
        fd = self._writable(segment, offset + wanted)
        if os.pwritev(fd, buffers, offset) != wanted:
            raise OSError(errno.EIO, "the disk wrote only part of a block")
        self._drop_pages(fd, offset, wanted)

    def read(self, first_slot: int, buffers: Sequence[memoryview], skip_bytes: int = 0) -> int:
        """Fills the buffers from `skip_bytes` after the start of `first_slot`. Returns the bytes
        read: fewer, or 0, if the segment is truncated or missing. Raises OSError."""
        geometry = self.geometry
        offset = geometry.offset(first_slot) + skip_bytes
        try:
            fd = self._open(first_slot // geometry.slots_per_segment, create=False)
        except FileNotFoundError:
            return 0
        got = os.preadv(fd, buffers, offset)
        self._drop_pages(fd, offset, got)
        return got

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _drop_pages(self, fd: int, offset: int, num_bytes: int) -> None:
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
                os.ftruncate(fd, old_bytes)  # frees what a full disk has allocated
            raise


class Disk(Struct, frozen=True, kw_only=False):
    """`direct`: whether blocks of `block_bytes` bypass the page cache. The rate is measured by a
    short read, so it is only a first estimate."""

    direct: bool
    read_bytes_per_s: float
    block_bytes: int


def probe_disk(folder: Path, block_bytes: int) -> Disk:
    """Measures the disk by one small file in `folder`, which then keeps the result for a week: a
    busy disk takes half a second. Raises OSError if nothing can be written there."""
    path = folder / PROBE_NAME
    kept = _kept_probe(path)
    if kept is not None and kept.block_bytes == block_bytes:
        return kept
    disk = None
    try:
        if block_bytes % PAGE_BYTES == 0:
            with contextlib.suppress(_NoDirectError):
                disk = Disk(True, _read_rate(path, os.O_DIRECT), block_bytes)
        disk = disk or Disk(False, _read_rate(path, 0), block_bytes)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):  # a full disk, so the next start measures again
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(disk))
    return disk


def _kept_probe(path: Path) -> Disk | None:
    try:
        status = path.stat()
        if status.st_size > _MOST_KEPT_BYTES or time.time() - status.st_mtime > _KEPT_S:
            return None
        kept = msgspec.json.decode(path.read_bytes(), type=Disk)
        return kept if kept.read_bytes_per_s > 0 else None
    except (OSError, *MALFORMED):
        return None


class _NoDirectError(Exception):
    pass


def _read_rate(path: Path, flags: int) -> float:
    fd = -1
    pages = mmap.mmap(-1, _PROBE_STEP_BYTES)
    pages.write(os.urandom(PAGE_BYTES) * (_PROBE_STEP_BYTES // PAGE_BYTES))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o600)
        for offset in range(0, _PROBE_BYTES, _PROBE_STEP_BYTES):
            if os.pwritev(fd, [pages], offset) != len(pages):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not flags:
            os.fdatasync(fd)  # only written pages can be dropped from the page cache
        # The fastest of several passes: a busy machine makes a disk look slower, never faster.
        return _PROBE_BYTES / min(_read_s(fd, pages) for _ in range(_PROBE_PASSES))
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise _NoDirectError from None
        raise
    finally:
        if fd >= 0:
            os.close(fd)
        pages.close()


def _read_s(fd: int, pages: mmap.mmap) -> float:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began_s = time.perf_counter()
    for offset in range(0, _PROBE_BYTES, _PROBE_STEP_BYTES):
        os.preadv(fd, [pages], offset)
    return max(time.perf_counter() - began_s, 1e-6)
