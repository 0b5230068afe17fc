"""Learns online the factor by which observed times differ from a profile's times.

A profile is measured once, on an idle machine. A profile does not know of later load, of
temperature or of another machine. The Conductor keeps one factor for each kind of work of each
instance, and an instance keeps one for its own steps. This module predicts nothing: callers
multiply their predictions by the factor.

    sample = sum of observed seconds / sum of expected seconds, over STEPS_PER_SAMPLE steps
    factor = quantile of the last WINDOW samples, weighted by expected seconds

The factor is the median, or a higher quantile if most samples should lie below it. So neither a
burst of slow steps nor a single outlier moves it far. A sample spans several steps because requests
that share a step share its time: one of them seems to take all of it, and the others none.

Before there are enough samples, `begin` takes the ratio over all steps so far, together with
PRIOR_STEPS steps assumed to take exactly the expected time. If the ratio is far from 1, it becomes
the factor. So the first prompt of a cold cluster corrects a profile that is off by much, and noise
changes nothing.

Samples are weighted because a queue is a sum of times, most of which come from long requests. Only
sums, ratios and comparisons are used, so that every machine gets the same factor.
"""

from __future__ import annotations

from collections import deque
from math import fsum, inf

from moonpool.distributions import rank_above

STEPS_PER_SAMPLE = 4
"""Observations with a time above 0 that make one sample."""
WINDOW = 31
"""Samples remembered."""
MIN_SAMPLES = 3
"""With fewer samples than this, only `begin` and `inherit` change the factor."""
MIN_CHANGE = 0.02
"""Smallest relative change of the factor; smaller changes are ignored, so that it does not move
with every sample."""
PRIOR_STEPS = 1
"""The number of steps, assumed to take the expected time, that count together with the first
observed ones."""
EARLY_CHANGE = 1.25
"""A factor from few steps stays 1 unless it, or its inverse, is more."""
MAX_FACTOR = 4.0
"""Samples are clamped to [1 / MAX_FACTOR, MAX_FACTOR]. Beyond that something is broken, and the
factor should not hide it."""

FORGOTTEN_AFTER = 300
"""Steps of other sizes after which the ratios of a size are forgotten. A size that was slow once
would otherwise never be tried again."""

ROUNDING = 1e-9
"""Tolerance above the error of the few floating-point operations here, relative to the numbers
added."""

MAX_SECONDS = 1e9
"""Longer observations are ignored, so that sums stay finite."""


class LearnedFactor:
    """The learned factor of one kind of work of one instance. `value` is 1 before the first
    measurement, unless it is inherited."""

    __slots__ = (
        "_all_expected_s",
        "_all_s",
        "_expected_s",
        "_num_steps",
        "_num_summed",
        "_prior",
        "_recent",
        "_seconds",
        "_share",
        "_summed",
        "value",
    )

    def __init__(self, share: float = 0.5, summed: int = STEPS_PER_SAMPLE) -> None:
        """`share`: the quantile, given as the share of samples below the factor. `summed`: number
        of steps in one sample."""
        self.value = 1.0
        self._all_s = self._all_expected_s = 0.0  # sums over all steps until the factor is learned
        self._num_steps = 0
        self._prior = 1.0
        self._share = share
        self._summed = summed
        self._seconds = 0.0
        self._expected_s = 0.0
        self._num_summed = 0
        # (ratio, expected seconds) of recent steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def is_learned(self) -> bool:
        """Whether there are enough samples. If not, `value` comes from the first steps (`begin`) or
        from other instances, or is 1."""
        return len(self._recent) >= MIN_SAMPLES

    @property
    def has_steps(self) -> bool:
        """Whether there is any observation of its own."""
        return self._num_steps > 0

    @property
    def samples(self) -> tuple[float, ...]:
        """The recent ratios of seconds taken to seconds expected, in rising order."""
        return tuple(sorted(ratio for ratio, _ in self._recent))

    def observe(self, seconds: float, expected_s: float) -> bool:
        """Adds an observation: the work took `seconds`; the profile predicted `expected_s`. 0
        seconds means that the step ended together with the previous observation. Returns True if
        the factor changed. Invalid times (negative, infinite, NaN) are ignored."""
        if not (0.0 <= seconds < MAX_SECONDS and 0.0 < expected_s < MAX_SECONDS):
            return False
        whole = self._num_summed >= self._summed and seconds > 0.0
        changed = whole and self._end_sample()
        self._seconds += seconds
        self._expected_s += expected_s
        self._num_summed += seconds > 0.0
        if not self.is_learned:
            self._all_s += seconds
            self._all_expected_s += expected_s
            self._num_steps += seconds > 0.0
        return changed

    def inherit(self, value: float) -> bool:
        """Begins with the factor of other instances. Returns True if the factor changed."""
        if self.has_steps:
            return False
        changed = value != self.value
        self._prior = self.value = value
        return changed

    def begin(self, seconds: float = 0.0, expected_s: float = 0.0) -> bool:
        """Takes the first steps as they are, before they make enough samples. `seconds`: time since
        the step under way began, if there is one; the profile predicts `expected_s` for the whole
        step, so that it takes at least that long. Returns True if the factor changed."""
        if not (0.0 <= seconds < MAX_SECONDS and 0.0 <= expected_s < MAX_SECONDS):
            return False
        is_under_way = expected_s > 0.0 and seconds > 0.0
        num_steps = self._num_steps + is_under_way
        all_expected_s = self._all_expected_s + expected_s
        if self.is_learned or not num_steps or all_expected_s <= 0.0:
            return False
        ratio = (self._all_s + seconds) / all_expected_s
        value = (PRIOR_STEPS * self._prior + num_steps * ratio) / (PRIOR_STEPS + num_steps)
        value = min(max(value, 1.0 / MAX_FACTOR), MAX_FACTOR)
        if is_under_way:
            value = max(value, self.value)
        if 1.0 / EARLY_CHANGE < value < EARLY_CHANGE:
            value = 1.0
        changed = value != self.value
        self.value = value
        return changed

    def begins_after_s(self, expected_s: float) -> float:
        """How long the step under way must last before `begin` can learn from it: after `begin` has
        returned False, it does so again for fewer seconds of the same step. Returns infinity
        without a step (`expected_s` 0)."""
        if expected_s <= 0.0:
            return inf
        num_steps = self._num_steps + 1
        unchanged = EARLY_CHANGE if self.value == 1.0 else self.value
        ratio = (unchanged * (PRIOR_STEPS + num_steps) - PRIOR_STEPS * self._prior) / num_steps
        seconds = ratio * (self._all_expected_s + expected_s) - self._all_s
        return seconds - ROUNDING * (abs(seconds) + self._all_s + 1.0)

    def _end_sample(self) -> bool:
        """Called with the first observation of the next step: until then, further observations may
        belong to the last one."""
        ratio = min(max(self._seconds / self._expected_s, 1.0 / MAX_FACTOR), MAX_FACTOR)
        self._recent.append((ratio, self._expected_s))
        self._seconds = self._expected_s = 0.0
        self._num_summed = 0
        if not self.is_learned:
            return False
        found = self._quantile()
        value = 1.0 if abs(found - 1.0) < MIN_CHANGE else found
        if value != 1.0 and abs(value - self.value) < MIN_CHANGE * self.value:
            return False
        changed = value != self.value
        self.value = value
        return changed

    def _quantile(self) -> float:
        ordered = sorted(self._recent)
        left_s = self._share * fsum([expected_s for _, expected_s in ordered])
        for ratio, expected_s in ordered:
            left_s -= expected_s
            if left_s < 0.0:
                return ratio
        return ordered[-1][0]


class FactorsBySize:
    """The factor by which steps of each size take longer than predicted: a quantile of recent
    ratios.

    Sizes up to the same power of two share their ratios. A profile is a formula, and devices work
    in tiles: its error at one tile is not that at two. A size with few ratios also uses the last
    ratios of all sizes, so that one slow step does not exclude this size.
    """

    __slots__ = ("_all", "_num_observed", "_ratios", "_seen", "_share", "_values")

    def __init__(self, share: float) -> None:
        """`share`: the quantile, defined as in `LearnedFactor`."""
        self._share = share
        # recent samples as (class of size, ratio)
        self._all: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._ratios: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        # factor by class of size, computed since the last observation
        self._values: dict[int, float] = {}
        self._num_observed = 0

    def value(self, size: int) -> float:
        """The factor of a step of `size` tiles; 1 with too few observations of all sizes."""
        own = _size_class(size)
        value = self._values.get(own)
        if value is None:
            value = self._values[own] = self._quantile(own)
        return value

    def _quantile(self, own: int) -> float:
        ratios = list(self._ratios.get(own, ()))
        if len(ratios) * (1.0 - self._share) <= 1.0:
            ratios += [ratio for other, ratio in self._all if other != own]
        if len(ratios) < MIN_SAMPLES:
            return 1.0
        return sorted(ratios)[rank_above(self._share, len(ratios))]

    def observe(self, size: int, seconds: float, expected_s: float) -> None:
        """Adds a step. Invalid times (negative, infinite, NaN) are ignored."""
        if not (0.0 <= seconds < MAX_SECONDS and 0.0 < expected_s < MAX_SECONDS):
            return
        ratio = min(max(seconds / expected_s, 1.0 / MAX_FACTOR), MAX_FACTOR)
        own = _size_class(size)
        self._values.clear()
        self._ratios.setdefault(own, deque(maxlen=WINDOW)).append(ratio)
        self._all.append((own, ratio))
        self._num_observed += 1
        self._seen[own] = self._num_observed
        for other, seen in list(self._seen.items()):
            if self._num_observed - seen > FORGOTTEN_AFTER:
                del self._ratios[other], self._seen[other]


def _size_class(size: int) -> int:
    return max(size - 1, 0).bit_length()
