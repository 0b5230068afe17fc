"""How sure a share is that was measured several times: attainments, their interval, a verdict.

The runs are independent draws of what may come, so their spread tells (Student's t); where they
hardly differ, the interval is at least what as many independent requests would leave (Wilson).
Pure; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import atan, cos, fsum, pi, sqrt, tan
from statistics import NormalDist

from moonpool.types import Struct


class Attainment(Struct, frozen=True):
    """Of one run: requests that arrived, and those completed within both SLOs. What was rejected or
    failed is among the first and not among the second."""

    num_requests: int
    num_effective: int

    @property
    def share(self) -> float:
        return self.num_effective / max(self.num_requests, 1)


class Verdict(Enum):
    MEETS = "meets"
    MISSES = "misses"
    UNCLEAR = "unclear"


class Interval(Struct, frozen=True):
    low: float
    mean: float
    high: float

    def verdict(self, wanted: float) -> Verdict:
        if self.low >= wanted:
            return Verdict.MEETS
        return Verdict.MISSES if self.high < wanted else Verdict.UNCLEAR


def interval(runs: Sequence[Attainment], confidence: float) -> Interval:
    """Two-sided, of the share of effective requests in all runs together. Of one run alone it knows
    only what the number of its requests says: too little to decide by."""
    assert runs and 0 < confidence < 1
    num_requests = sum(run.num_requests for run in runs)
    mean = sum(run.num_effective for run in runs) / max(num_requests, 1)
    low, high = wilson(mean, max(num_requests, 1), confidence)
    if len(runs) > 1:
        squares = fsum((run.share - mean) ** 2 for run in runs)
        half = student_t(confidence, len(runs) - 1) * sqrt(squares / (len(runs) - 1) / len(runs))
        low, high = min(low, mean - half), max(high, mean + half)
    return Interval(max(low, 0.0), mean, min(high, 1.0))


def wilson(share: float, number: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `number` independent trials."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    weight = z * z / number
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * sqrt(share * (1 - share) / number + weight / number / 4)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def student_t(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = confidence, by bisection. With T = sqrt(freedom) tan(a), the density of
    the angle a is proportional to cos(a)^(freedom - 1)."""
    whole = _cosine_area(pi / 2, freedom - 1)
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _cosine_area(middle, freedom - 1) < confidence * whole:
            low = middle
        else:
            high = middle
    return sqrt(freedom) * tan(min(high, atan(1e9)))


def _cosine_area(end: float, power: int, pieces: int = 64) -> float:
    """Integral of cos^power from 0 to `end`, by Simpson's rule."""
    step = end / pieces
    terms = [(1 if i in (0, pieces) else 4 if i % 2 else 2) * max(cos(i * step), 0.0) ** power
             for i in range(pieces + 1)]  # fmt: skip
    return fsum(terms) * step / 3
