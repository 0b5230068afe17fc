"""Tunes garbage collection and thread switching, so that Python does not delay the engine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GIL_INTERVAL_S = 5e-4
YOUNG_OBJECTS = 50_000
"""Allocations between two collections, for work with hardly any reference cycles."""


def settle_memory() -> None:
    """Exempts all current objects from collection. Call it when a process has started.

    Modules and weights stay for good. Otherwise each full collection would visit hundreds of
    thousands of objects, and a decode step would wait for it. The memory that loading and
    measuring have freed goes back to the machine.
    """
    gc.collect()
    gc.freeze()
    # C libraries other than glibc lack this function
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes garbage collections rare, for work with hardly any reference cycles, such as a
    simulation.

    Objects from before are not visited, and new ones seldom. Cycles are still found.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def settle_threads() -> None:
    """Shortens the interpreter's switch interval. Must be called before anything else.

    A thread that returns from a kernel waits up to one interval for the interpreter. An engine does
    so for each operation of each layer, and Python's default of 5 ms exceeds most steps.
    """
    sys.setswitchinterval(GIL_INTERVAL_S)
