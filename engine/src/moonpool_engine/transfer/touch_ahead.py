"""Touches the pages of an arena shortly before they are used.

The first touch of a page costs more than a copy into it, because the kernel must clear the page. An
arena that is large and mostly empty should still not take its whole memory at the start. So a
thread touches the pages of blocks shortly before their first use, and a few more.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from pathlib import Path

import numpy as np

MADV_POPULATE_WRITE = 23
AHEAD_BYTES = 4 << 20
STEP_BYTES = 4 << 20
STRICT = "2"
"""The value of vm.overcommit_memory at which the kernel never overcommits."""
log = logging.getLogger("moonpool.worker")


def may_touch_late(setting: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    """Whether the first touch of a page of a memory file cannot fail with SIGBUS.

    With strict accounting a later touch can fail, so an arena is then touched whole at the
    start."""
    try:
        return setting.read_text().strip() != STRICT
    except OSError:
        return False


class TouchAhead:
    """Touches the mapping from its start on, as far as `reach` says, in a thread of its own.

    Holds the mapping until `close`."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._num_bytes = num_bytes
        self._reached = -1
        self._touched = 0
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def reach(self, num_bytes: int) -> None:
        """Notes that the bytes up to `num_bytes` are in use, or soon will be. Never waits for
        pages."""
        if num_bytes <= self._reached:
            return
        self._reached = num_bytes
        if self._wanted() <= self._touched:
            return
        with self._change:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="touch", daemon=True)
                self._thread.start()
            self._change.notify()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join()

    def _wanted(self) -> int:
        return min(self._reached + AHEAD_BYTES, self._num_bytes)

    def _run(self) -> None:
        # this call releases the GIL, unlike mmap's method
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start = self._bytes.ctypes.data
        while True:
            with self._change:
                while not self._closed and self._touched >= self._wanted():
                    self._change.wait()
                if self._closed:
                    return
            length = min(STEP_BYTES, self._num_bytes - self._touched)
            if madvise(start + self._touched, length, MADV_POPULATE_WRITE):
                # Kernels before 5.14; or no memory is left now, and a later touch may succeed.
                text = os.strerror(ctypes.get_errno())
                log.debug("pages are touched by their first use: %s", text)
                return
            self._touched += length
