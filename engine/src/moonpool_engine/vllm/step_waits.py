"""How long vLLM's steps wait for the pool, and for copies.

All waits of one step for the pool share `STEP_S`: a pool that is dead, stopped or late costs a step
no more than that, with any number of requests. Waits for copies within this process do not depend
on the pool, and have no bound but the bytes that are copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_S = 0.02


class StepWaits:
    """Measures how long one process's steps wait for the pool. Only the thread that runs the steps
    may use it."""

    def __init__(self, most_s: float = STEP_S, now: Callable[[], float] = time.monotonic) -> None:
        """`most_s`: the longest time that a step waits for the pool."""
        self.longest_s = 0.0
        """The longest that a step has waited for the pool. A wait counts up to its bound, because
        any further time only shows that the machine is too busy to end the wait."""
        self.longest_copy_s = 0.0
        """The longest that a step has waited for copies, as the clock says."""
        self._most_s = most_s
        self._now = now
        self._waited_s = self._copied_s = 0.0  # seconds of waiting and copying in this step

    def begin_step(self) -> None:
        self._waited_s = self._copied_s = 0.0

    def wait(
        self, condition: threading.Condition, is_done: Callable[[], bool], most_s: float
    ) -> bool:
        """Waits until `is_done`, for at most `most_s` and at most the time left in the step.
        Returns whether it is done. The caller holds `condition`."""
        left_s = min(most_s, self._most_s - self._waited_s)
        if is_done() or left_s <= 0.0:
            return is_done()
        began_s = self._now()
        done = condition.wait_for(is_done, left_s)
        self._waited_s += min(self._now() - began_s, left_s)
        self.longest_s = max(self.longest_s, self._waited_s)
        return done

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A context whose code waits for copies of this process."""
        began_s = self._now()
        try:
            yield
        finally:
            self._copied_s += self._now() - began_s
            self.longest_copy_s = max(self.longest_copy_s, self._copied_s)
