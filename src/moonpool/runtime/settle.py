"""Keeps Python itself from making a process's engine wait."""

from __future__ import annotations

import gc
import sys

GIL_INTERVAL_S = 5e-4


def settle_memory() -> None:
    """To be called once a process is up. Modules and weights stay for good: without this, each full
    collection walks hundreds of thousands of objects, and a decode step waits for it."""
    gc.collect()
    gc.freeze()


def settle_threads() -> None:
    """To be called first. A thread that comes back from a kernel asks for the interpreter, and gets
    it after so long at the latest; an engine does that for each operation of each layer, and
    Python's own 5 ms would be more than most steps take."""
    sys.setswitchinterval(GIL_INTERVAL_S)
