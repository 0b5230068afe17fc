"""A distribution in bounded memory: counts in logarithmic bins, at most 0.05 % off."""

from __future__ import annotations

from math import exp, floor, log
from typing import Any

GROWTH = 1.001
_LOG_GROWTH = log(GROWTH)
SMALLEST = 1e-7


class Histogram:
    """Of values >= 0. Mean, minimum and maximum are exact; quantiles are those of the bins."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
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
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The smallest value with at least `share` of all at or below it."""
        wanted = max(1.0, share * self.count)
        seen = 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted - 1e-9:
                return min(_middle(index), self.largest)
        return 0.0

    def share_up_to(self, value: float) -> float:
        """Share of all values that are at most `value`."""
        below = sum(number for index, number in self._bins.items() if _middle(index) <= value)
        return below / self.count if self.count else 0.0

    def summary(self) -> dict[str, float]:
        return {
            "mean": rounded(self.mean),
            "p50": rounded(self.quantile(0.5)),
            "p90": rounded(self.quantile(0.9)),
            "p99": rounded(self.quantile(0.99)),
        }

    def curve(self, num_points: int = 100) -> list[tuple[float, float]]:
        """(value, share of all at or below it) at about `num_points` places, for a plot."""
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


def rounded(value: Any, digits: int = 6) -> float:
    """Six significant digits: what is printed must not depend on a library's last bit."""
    return float(f"{value:.{digits}g}")
