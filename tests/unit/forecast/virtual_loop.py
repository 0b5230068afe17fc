"""Runs an event loop with a clock of its own, which jumps to the next timer when nothing is ready.

Client and server run in the loop with real sockets between them, so no result depends on how busy
the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

REAL_WAIT_S = 0.0005
"""The real time that bytes on the loopback may take to arrive."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout is None or timeout <= 0:
            return ready if ready or timeout == 0 else super().select(timeout)
        ready = super().select(REAL_WAIT_S)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now_s
