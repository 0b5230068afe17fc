"""By what factor the times that are seen depart from those that a profile says.

A profile is measured once, on an idle machine; what runs beside it, how warm it is and whose
machine it is, show later. The Conductor keeps a factor for each kind of work of each instance, and
an instance one for its own steps. Nothing here predicts: it only says by what to multiply.

The factor is a median of recent samples (or another quantile, where most should lie below it), so
that neither a storm of slow steps nor a single hiccup moves it far. A sample is the ratio of sums
over a few steps, because works that share one take each other's time: one is seen to take all of
it, the others none. Each counts as much as was expected of it: a queue is a sum of times, and long
works make most of it. Sums, ratios and comparisons only: every machine finds the same.
"""

from __future__ import annotations

from collections import deque
from math import fsum

SUMMED = 4
"""Steps of one sample: observations that took any time."""
WINDOW = 31
"""Samples remembered."""
FEWEST = 3
"""Before so many samples, the profile is believed."""
NOTICED = 0.02
"""A factor that moves less stays where it is: it would move with every sample."""
MOST = 4.0
"""Nothing is believed to take more than so many times what the profile says, nor less than the
same part of it: beyond that something is broken, and the belief should not hide it."""

LONGEST_S = 1e9
"""Nothing takes as long. Sums of what is believed stay finite."""


class LearnedFactor:
    """One kind of work of one instance. Begins at 1: the profile is right."""

    __slots__ = ("_expected_s", "_num_summed", "_recent", "_seconds", "_share", "_summed", "value")

    def __init__(self, share: float = 0.5, summed: int = SUMMED) -> None:
        """`share` of the samples lie below it; each is of `summed` steps."""
        self.value = 1.0
        self._share = share
        self._summed = summed
        self._seconds = 0.0
        self._expected_s = 0.0
        self._num_summed = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # ratios, seconds expected

    @property
    def samples(self) -> tuple[float, ...]:
        """The recent ratios of seconds taken to seconds expected, in rising order."""
        return tuple(sorted(ratio for ratio, _ in self._recent))

    def observe(self, seconds: float, expected_s: float) -> bool:
        """Something took so long of which the profile says `expected_s`; 0: it ended with what was
        told before it. True if that changed the factor. What is no time at all (negative, endless,
        NaN) teaches nothing."""
        if not (0.0 <= seconds < LONGEST_S and 0.0 < expected_s < LONGEST_S):
            return False
        whole = self._num_summed >= self._summed and seconds > 0.0
        changed = whole and self._end_sample()
        self._seconds += seconds
        self._expected_s += expected_s
        self._num_summed += seconds > 0.0
        return changed

    def _end_sample(self) -> bool:
        """Not before the next step is seen: until then, more of the last one may be told."""
        ratio = min(max(self._seconds / self._expected_s, 1.0 / MOST), MOST)
        self._recent.append((ratio, self._expected_s))
        self._seconds = self._expected_s = 0.0
        self._num_summed = 0
        if len(self._recent) < FEWEST:
            return False
        found = self._quantile()
        value = 1.0 if abs(found - 1.0) < NOTICED else found
        if value != 1.0 and abs(value - self.value) < NOTICED * self.value:
            return False
        changed = value != self.value
        self.value = value
        return changed

    def _quantile(self) -> float:
        ordered = sorted(self._recent)
        left_s = self._share * fsum(expected_s for _, expected_s in ordered)
        for ratio, expected_s in ordered:
            left_s -= expected_s
            if left_s < 0.0:
                return ratio
        return ordered[-1][0]
