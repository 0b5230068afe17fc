"""How far a prediction was off, on average."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PredictionError:
    """In the unit of what was predicted; positive: too much was predicted."""

    count: int = 0
    signed_sum: float = 0.0
    absolute_sum: float = 0.0

    def note(self, predicted: float, actual: float) -> None:
        self.count += 1
        self.signed_sum += predicted - actual
        self.absolute_sum += abs(predicted - actual)

    @property
    def mean(self) -> float:
        return self.signed_sum / self.count if self.count else 0.0

    @property
    def mean_absolute(self) -> float:
        return self.absolute_sum / self.count if self.count else 0.0
