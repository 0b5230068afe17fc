"""How far a fetch has come, layer by layer: opened by who moves the blocks, waited at by
who reads them before all of them are there.

    closed -> open for the first layers -> open for all, once the operation's end has been told
    any of them -> broken: what is not open by then never will be
"""

from __future__ import annotations

import sys
import threading
import time

PROGRESS_PARTS = 8
"""So many times at most is told how far an operation has come."""


class LayerGate:
    """Thread-safe. What it is open for has arrived and holds, of every block of the operation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_open = 0
        self._broken = False

    def open(self, num_layers: int) -> None:
        """For the first `num_layers` layers; never closes again."""
        with self._changed:
            self._num_open = max(self._num_open, num_layers)
            self._changed.notify_all()

    def end(self, complete: bool) -> None:
        """The operation is over, and its end has been told: all is here, or nothing more comes."""
        with self._changed:
            if complete and not self._broken:
                self._num_open = sys.maxsize
            self._broken = True
            self._changed.notify_all()

    def break_off(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def wait(self, layer: int, deadline_s: float) -> bool:
        """Until it is open for `layer`; False if it is broken, or was not open by then."""
        if self._num_open > layer:
            return True
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or self._num_open > layer,
                max(0.0, deadline_s - time.monotonic()),
            )
            return self._num_open > layer


def tells_progress(num_layers: int, all_layers: int) -> bool:
    """Whether so many layers are one of the occasions on which progress is told."""
    step = max(1, all_layers // PROGRESS_PARTS)
    return 0 < num_layers < all_layers and num_layers % step == 0
