"""A histogram of ratios of measured to predicted times, whose old values fade.

Bins lie on a grid that halves and doubles exactly: a ratio of x falls into bin
`log2(x) * BINS_PER_OCTAVE`, with the logarithm replaced by its chord within each octave. So only
additions, multiplications and comparisons are used, and every machine gets the same shares.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import frexp

BINS_PER_OCTAVE = 32
"""Between a ratio and its double, of equal width: 1.6 to 3.1 % each."""
LOWEST_OCTAVE, HIGHEST_OCTAVE = -1, 3
"""Ratios below 1/4 count as 1/4, those above 8 as 8: both are far from any SLO."""
NUM_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE + 1) * BINS_PER_OCTAVE
MEMORY = 512.0
"""At twice this weight, the weights of all values so far are halved."""


def place_of(ratio: float, lowest_octave: int = 0) -> float:
    """The ratio's place on a grid without ends, in bins; the ratio must be above 0."""
    fraction, exponent = frexp(ratio)
    return (exponent - lowest_octave + 2.0 * fraction - 1.0) * BINS_PER_OCTAVE


def ratio_at(place: int, lowest_octave: int = 0) -> float:
    """The inverse of `place_of`."""
    octave, part = divmod(place, BINS_PER_OCTAVE)
    return float(2.0 ** (octave + lowest_octave - 1) * (1.0 + part / BINS_PER_OCTAVE))


def position(ratio: float) -> float:
    """The ratio's place on the grid, from 0 to `NUM_BINS`; the ratio must be above 0."""
    return min(max(place_of(ratio, LOWEST_OCTAVE), 0.0), float(NUM_BINS))


def edge(index: int) -> float:
    """The ratio at the lower edge of a bin: the inverse of `position`."""
    return ratio_at(index, LOWEST_OCTAVE)


def share_at(shares: list[float], ratio: float) -> float:
    """Interpolates cumulative shares, one per edge of a bin (`NUM_BINS + 1` in total)."""
    place = position(ratio)
    index = min(int(place), NUM_BINS - 1)
    return shares[index] + (place - index) * (shares[index + 1] - shares[index])


class RatioHistogram:
    """One distribution. `first_guess`: ratios that stand in for values until there are some; all
    together weigh as much as `guess_weight` values."""

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
