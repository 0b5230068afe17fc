"""What the disk below a folder can do, found by writing and reading one small file there."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from moonpool.messenger.store.format import PAGE_BYTES

PROBE_NAME = "probe"
_PROBE_BYTES = 8 << 20
_PROBE_STEP_BYTES = 4 << 20
_PROBE_PASSES = 3


@dataclass(frozen=True, slots=True)
class Disk:
    """`direct`: blocks can be moved past the page cache. The rate is that of a short read, good
    for a first estimate only."""

    direct: bool
    read_bytes_per_s: float


def probe_disk(folder: Path, block_bytes: int) -> Disk:
    """Takes some hundredths of a second. Raises OSError if nothing can be written there."""
    path = folder / PROBE_NAME
    try:
        if block_bytes % PAGE_BYTES == 0:
            with contextlib.suppress(_NoDirectError):
                return Disk(True, _read_rate(path, os.O_DIRECT))
        return Disk(False, _read_rate(path, 0))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


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
            os.fdatasync(fd)  # the page cache lets go only of what is written
        # The best: a busy machine makes a disk look slower, never faster.
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
