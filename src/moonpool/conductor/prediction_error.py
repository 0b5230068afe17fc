"""How far predictions were off."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp

PARTS = 32
"""Bins between a ratio and its double, of equal width: 1.6 to 3.1 % each."""


@dataclass(slots=True)
class PredictionError:
    """Sums are in the unit of what was predicted; positive: too much was."""

    count: int = 0
    too_much: float = 0.0  # sum over those that were too high
    too_little: float = 0.0  # over those that were too low
    num_ratios: int = 0
    _ratios: dict[int, int] = field(default_factory=dict)  # by bin

    def note(self, predicted: float, actual: float) -> None:
        self.count += 1
        if predicted >= actual:
            self.too_much += predicted - actual
        else:
            self.too_little += actual - predicted
        if predicted > 0 and actual > 0:
            fraction, exponent = frexp(predicted / actual)
            place = exponent * PARTS + round((2.0 * fraction - 1.0) * PARTS)
            self._ratios[place] = self._ratios.get(place, 0) + 1
            self.num_ratios += 1

    @property
    def mean(self) -> float:
        return (self.too_much - self.too_little) / self.count if self.count else 0.0

    @property
    def mean_absolute(self) -> float:
        return (self.too_much + self.too_little) / self.count if self.count else 0.0

    def ratio(self, share: float) -> float:
        """Predicted over actual: what `share` of all predictions do not exceed, to 3 %. 0 if there
        is none; where either was 0, there is no ratio."""
        seen = 0
        for place in sorted(self._ratios):
            seen += self._ratios[place]
            if seen >= share * self.num_ratios:
                exponent, part = divmod(place, PARTS)
                return float(2.0 ** (exponent - 1) * (1.0 + part / PARTS))
        return 0.0

    def summary(self) -> dict[str, float]:
        return {
            "count": self.count,
            "mean": self.mean,
            "mean_absolute": self.mean_absolute,
            "ratio_p50": self.ratio(0.5),
            "ratio_p90": self.ratio(0.9),
        }
