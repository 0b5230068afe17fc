"""Keeps Python's garbage collector away from what start-up has built."""

from __future__ import annotations

import gc


def settle_memory() -> None:
    """To be called once a process is up. Modules and weights stay for good: without this, each full
    collection walks hundreds of thousands of objects, and a decode step waits for it."""
    gc.collect()
    gc.freeze()
