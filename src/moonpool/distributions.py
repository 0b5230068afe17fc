"""Quantiles, and histograms that do not grow with the number of values.

Three rules for quantiles, for three uses:

- Figures of requests take the **nearest rank**: the smallest value with at least that share of the
  values at or below it. A quantile is always a measured value, and so is what `Histogram` returns.
- What decides takes the **rank above**: the smallest value with more than that share at or below
  it. Between two values it errs towards the larger, which is the slower or longer one.
- Tables of a trace, and of a few repeated runs, are **interpolated** between neighbours.

Shares are from 0 to 1. `ordered` must be in rising order and not empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil, exp, floor, frexp, log
from typing import Any

_TINY = 1e-9
"""Tolerance for rounding: 0.07 of 100 values is 7.000000000000001 of them, which means 7."""


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of all values at or below it."""
    return ordered[max(ceil(share * len(ordered) - _TINY) - 1, 0)]


def nearest_bin(counts: Mapping[int, int], share: float, total: int) -> int:
    """Returns the bin of the nearest rank. `counts` are given by bin, with smaller values in lower
    bins; their sum, `total`, is at least 1."""
    left = max(1.0, share * total) - _TINY
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0.0:
            break
    return index


def rank_above(share: float, count: int) -> int:
    """Returns the index of a quantile among `count` sorted values: the first value with more than
    `share` of all values at or below it, or the last value if there is no such value."""
    return min(int(share * count), count - 1)


def interpolated(ordered: Sequence[float], share: float) -> float:
    """The value at this share of the way from the first to the last, between its neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def percentiles(values: Iterable[float], *percents: int) -> dict[str, float]:
    """The nearest ranks as "p50", "p99" and so on; 0 without values."""
    ordered = sorted(values) or [0.0]
    return {f"p{percent}": nearest_rank(ordered, percent / 100) for percent in percents}


def rounded(value: Any, digits: int = 6) -> float:
    """Rounds to significant digits: printed figures must not depend on a library's last bit."""
    return float(f"{value:.{digits}g}")


# A histogram of our own: its bins are at most 0.05 % off, it takes a count with each value (there
# are millions of equal token gaps), and its results are the same on every machine. NumPy's
# histogram needs all values at once; hdrhistogram and ddsketch would be dependencies.
GROWTH = 1.001
_LOG_GROWTH = log(GROWTH)
SMALLEST = 1e-7


class Histogram:
    """A distribution of values >= 0 in logarithmic bins. The mean and the maximum are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Adds `times` values of the same size."""
        assert value >= 0 and times >= 0
        if not times:
            return
        self.count += times
        self.total += value * times
        if value > self.largest:
            self.largest = value
        index = floor(log(value / SMALLEST) / _LOG_GROWTH) if value > SMALLEST else -1
        self._bins[index] = self._bins.get(index, 0) + times

    @property
    def mean(self) -> float:
        """The mean is 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The smallest value with at least `share` of all values at or below it; 0 without any."""
        if not self.count:
            return 0.0
        return min(_middle(nearest_bin(self._bins, share, self.count)), self.largest)

    def share_up_to(self, value: float) -> float:
        """The share of values that are at most `value`."""
        below = sum(number for index, number in self._bins.items() if _middle(index) <= value)
        return below / self.count if self.count else 0.0

    def summary(self) -> dict[str, float]:
        """Returns mean, p50, p90 and p99, rounded."""
        return {
            "mean": rounded(self.mean),
            "p50": rounded(self.quantile(0.5)),
            "p90": rounded(self.quantile(0.9)),
            "p99": rounded(self.quantile(0.99)),
        }

    def curve(self, num_points: int = 100) -> list[tuple[float, float]]:
        """The cumulative distribution as about `num_points` points (value, share at or below)."""
        points: list[tuple[float, float]] = []
        seen = 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            share = seen / self.count
            if not points or share - points[-1][1] >= 1 / num_points or seen == self.count:
                points.append((rounded(min(_middle(index), self.largest)), rounded(share)))
        return points


def _middle(index: int) -> float:
    return 0.0 if index < 0 else SMALLEST * exp((index + 0.5) * _LOG_GROWTH)


BINS_PER_OCTAVE = 32
"""Bins of equal width between a ratio and its double: 1.6 to 3.1 % each."""
LOWEST_OCTAVE, HIGHEST_OCTAVE = -1, 3
"""Ratios below 1/4 count as 1/4, and ratios above 8 as 8, because both are far from any SLO."""
NUM_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE + 1) * BINS_PER_OCTAVE
MEMORY = 512.0
"""When the values reach twice this weight, all weights so far are halved."""


def place_of(ratio: float, lowest_octave: int = 0) -> float:
    """The ratio's place on a grid without ends, in bins; the ratio must be above 0."""
    fraction, exponent = frexp(ratio)
    return (exponent - lowest_octave + 2.0 * fraction - 1.0) * BINS_PER_OCTAVE


def ratio_at(place: int, lowest_octave: int = 0) -> float:
    """Computes the inverse of `place_of`."""
    octave, part = divmod(place, BINS_PER_OCTAVE)
    return float(2.0 ** (octave + lowest_octave - 1) * (1.0 + part / BINS_PER_OCTAVE))


def position(ratio: float) -> float:
    """The ratio's place on the grid, from 0 to `NUM_BINS`; the ratio must be above 0."""
    return min(max(place_of(ratio, LOWEST_OCTAVE), 0.0), float(NUM_BINS))


def edge(index: int) -> float:
    """Returns the ratio at the lower edge of a bin, the inverse of `position`."""
    return ratio_at(index, LOWEST_OCTAVE)


def share_at(shares: list[float], ratio: float) -> float:
    """Interpolates cumulative shares, one per edge of a bin (`NUM_BINS + 1` in total)."""
    place = position(ratio)
    index = min(int(place), NUM_BINS - 1)
    return shares[index] + (place - index) * (shares[index + 1] - shares[index])


class RatioHistogram:
    """A histogram of ratios of measured to predicted times, whose old values fade.

    Bins lie on a grid that halves and doubles exactly: a ratio of x falls into bin
    `log2(x) * BINS_PER_OCTAVE`, with the logarithm replaced by its chord within each octave. So
    only additions, multiplications and comparisons are used, and every machine gets the same
    shares.

    `first_guess`: ratios to use until there are observed ones; together they weigh as much as
    `guess_weight` observed ratios."""

    def __init__(self, first_guess: list[float], guess_weight: float) -> None:
        self._weights = [0.0] * NUM_BINS
        for ratio in first_guess:
            self._add(ratio, guess_weight / len(first_guess))
        self._total = guess_weight

    def add(self, ratio: float) -> None:
        if self._total >= 2.0 * MEMORY:
            self._weights = [weight * 0.5 for weight in self._weights]
            self._total *= 0.5
        self._add(ratio, 1.0)
        self._total += 1.0

    @property
    def total(self) -> float:
        """The weight of all values."""
        return self._total

    def shares(self) -> list[float]:
        """The share of values below each edge of a bin."""
        return [weight / self._total for weight in (0.0, *accumulate(self._weights))]

    def quantile(self, share: float) -> float:
        """The ratio below which this share of the values lies, at the upper edge of its bin."""
        return edge(min(bisect_right(self.shares(), share), NUM_BINS))

    def _add(self, ratio: float, weight: float) -> None:
        self._weights[min(int(position(ratio)), NUM_BINS - 1)] += weight
