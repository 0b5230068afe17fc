"""When rejected requests should come back: one after another, as fast as the cluster completes.

If all were told the same time, they would all come back at once, and most would be rejected again.
"""

from __future__ import annotations

from collections import deque

from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import TrackedRequest

WINDOW = 64
"""Completed requests from which the rate follows."""
STALE_S = 60.0
"""If no request has completed for this long, the rate is unknown."""
MAX_RETRY_AFTER_S = 120.0


class RetrySchedule(ClusterObserver):
    """Assigns a time of return to each rejected request."""

    def __init__(self) -> None:
        self._completed_s: deque[float] = deque(maxlen=WINDOW)
        self._next_s = float("-inf")  # no rejected request is due after it

    def ended(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        if is_answered:
            self.note_completed(now)

    def note_completed(self, now: float) -> None:
        """Notes a completed request."""
        self._completed_s.append(now)

    def retry_after_s(self, least_s: float, now: float) -> float:
        """Returns the seconds after which the next rejected request should return.

        At least `least_s`, and at least 1 s; one mean time between two completed requests after the
        rejected request before it; at most MAX_RETRY_AFTER_S.
        """
        at_s = max(now + max(least_s, 1.0), min(self._next_s, now + MAX_RETRY_AFTER_S))
        self._next_s = at_s + self._gap_s(now)
        return min(max(at_s - now, 1.0), MAX_RETRY_AFTER_S)  # the difference is rounded

    def _gap_s(self, now: float) -> float:
        times_s = self._completed_s
        if len(times_s) < 2 or now - times_s[-1] > STALE_S:
            return 0.0
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1)
