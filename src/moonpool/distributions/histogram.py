"""A distribution in memory that does not grow with the number of values.

A histogram of our own: its bins are at most 0.05 % off, it takes a count with each value (millions
of token gaps come as runs of equal ones), and its results are the same on every machine.
`numpy.histogram` needs all values at once, and hdrhistogram and ddsketch would be dependencies for
60 lines.
"""

from __future__ import annotations

from math import exp, floor, log

from moonpool.distributions.quantiles import nearest_bin, rounded

GROWTH = 1.001
_LOG_GROWTH = log(GROWTH)
SMALLEST = 1e-7


class Histogram:
    """A distribution of values >= 0 in logarithmic bins. Mean and maximum are exact."""

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
        """0 without values."""
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
        """Mean, p50, p90 and p99, rounded."""
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
