"""By what factor the times that are seen depart from those that a profile says.

A profile is measured once, on an idle machine; what runs beside it, how warm it is and whose
machine it is, show later. The Conductor keeps a factor for each kind of work of each instance, and
an instance one for its own steps. Nothing here predicts: it only says by what to multiply.

The factor is a median of recent samples (or another quantile, where most should lie below it), so
that neither a storm of slow steps nor a single hiccup moves it far; a sample is the ratio of sums
over a few observations, because works that share a step take each other's time. Only
ratios and comparisons: every machine finds the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

SUMMED = 4
"""Observations of one sample."""
WINDOW = 31
"""Samples remembered."""
FEWEST = 5
"""Before so many samples, the profile is believed."""
INDIFFERENCE = 0.05
"""A factor that is nearer to 1 is taken for 1: the profile is no better than that itself."""
NOTICED = 0.02
"""A factor that moves less stays where it is: it would move with every sample."""
MOST = 4.0
"""Nothing is believed to take more than so many times what the profile says, nor less than the
same part of it: beyond that something is broken, and the belief should not hide it."""


class LearnedFactor:
    """One kind of work of one instance. Begins at 1: the profile is right."""

    __slots__ = (
        "_expected_s",
        "_num_summed",
        "_ordered",
        "_recent",
        "_seconds",
        "_share",
        "_summed",
        "value",
    )

    def __init__(self, share: float = 0.5, summed: int = SUMMED) -> None:
        """`share` of the samples lie below it; each is of `summed` observations."""
        self.value = 1.0
        self._share = share
        self._summed = summed
        self._seconds = 0.0
        self._expected_s = 0.0
        self._num_summed = 0
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    @property
    def samples(self) -> tuple[float, ...]:
        """The recent ratios of seconds taken to seconds expected, in rising order."""
        return tuple(self._ordered)

    def observe(self, seconds: float, expected_s: float) -> bool:
        """Something took so long of which the profile says `expected_s`. True if that changed the
        factor. What is no time at all (negative, infinite, NaN) teaches nothing."""
        if not (0.0 <= seconds < float("inf") and 0.0 < expected_s < float("inf")):
            return False
        self._seconds += seconds
        self._expected_s += expected_s
        self._num_summed += 1
        if self._num_summed < self._summed:
            return False
        ratio = min(max(self._seconds / self._expected_s, 1.0 / MOST), MOST)
        self._seconds = self._expected_s = 0.0
        self._num_summed = 0
        return self._add(ratio)

    def _add(self, ratio: float) -> bool:
        recent, ordered = self._recent, self._ordered
        recent.append(ratio)
        insort(ordered, ratio)
        if len(recent) > WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        if len(recent) < FEWEST:
            return False
        found = ordered[int(len(ordered) * self._share)]
        value = 1.0 if abs(found - 1.0) < INDIFFERENCE else found
        if value != 1.0 and abs(value - self.value) < NOTICED * self.value:
            return False
        changed = value != self.value
        self.value = value
        return changed
