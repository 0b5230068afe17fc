"""Keeps Python itself from making a process's engine wait."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GIL_INTERVAL_S = 5e-4
YOUNG_OBJECTS = 50_000
"""Between two looks for garbage, while hardly any of it is in cycles."""


def settle_memory() -> None:
    """To be called once a process is up. Modules and weights stay for good: without this, each full
    collection walks hundreds of thousands of objects, and a decode step waits for it."""
    gc.collect()
    gc.freeze()


@contextmanager
def rare_collections() -> Iterator[None]:
    """For work that drops hardly anything that is in a cycle, such as a simulation: what is there
    when it begins is not walked, and what comes is walked seldom. Cycles are still found."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def settle_threads() -> None:
    """To be called first. A thread that comes back from a kernel asks for the interpreter, and gets
    it after so long at the latest; an engine does that for each operation of each layer, and
    Python's own 5 ms would be more than most steps take."""
    sys.setswitchinterval(GIL_INTERVAL_S)
