"""How sure a share is that several runs measured: attainments, their interval, a verdict.

Runs are independent draws of the future, so their spread gives the interval (Student's t). Where
they hardly differ, the interval is at least that of as many independent requests (Wilson).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import fsum, sqrt

from moonpool.types import Struct


class Attainment(Struct, frozen=True):
    """Requests of one run, and those completed within both SLOs.

    `num_requests` includes rejected and failed requests, `num_effective` does not.
    """

    num_requests: int
    num_effective: int

    @property
    def share(self) -> float:
        return self.num_effective / max(self.num_requests, 1)


class Verdict(Enum):
    """Whether a share reaches the wanted one, at the wanted confidence."""

    MEETS = "meets"
    MISSES = "misses"
    UNCLEAR = "unclear"


class Interval(Struct, frozen=True):
    """A confidence interval of a share, with its mean."""

    low: float
    mean: float
    high: float

    def verdict(self, wanted: float) -> Verdict:
        if self.low >= wanted:
            return Verdict.MEETS
        return Verdict.MISSES if self.high < wanted else Verdict.UNCLEAR


def interval(runs: Sequence[Attainment], confidence: float) -> Interval:
    """Returns the two-sided interval of the share of effective requests in all runs together.

    A single run contributes only the number of its requests, which is too little to decide by.
    """
    from scipy import stats  # its import takes longer than most commands

    assert runs and 0 < confidence < 1
    num_requests = sum(run.num_requests for run in runs)
    num_effective = sum(run.num_effective for run in runs)
    mean = num_effective / max(num_requests, 1)
    requests = stats.binomtest(num_effective, max(num_requests, 1))
    wilson = requests.proportion_ci(confidence, method="wilson")
    low, high = float(wilson.low), float(wilson.high)
    if len(runs) > 1:
        freedom = len(runs) - 1
        squares = fsum((run.share - mean) ** 2 for run in runs)
        half = float(stats.t.ppf((1 + confidence) / 2, freedom)) * sqrt(
            squares / freedom / len(runs)
        )
        low, high = min(low, mean - half), max(high, mean + half)
    return Interval(max(low, 0.0), mean, min(high, 1.0))


def sample_interval(runs: Sequence[Attainment], confidence: float) -> Interval:
    """Returns the two-sided interval of the share of one more sample like these.

    It is wider than the interval of their mean: it is what one day gives, not what all days give
    together. It is at least that of as many independent requests as one sample has (Wilson).
    """
    from scipy import stats

    assert runs and 0 < confidence < 1
    number = len(runs)
    mean = fsum(run.share for run in runs) / number
    num_requests = max(round(sum(run.num_requests for run in runs) / number), 1)
    requests = stats.binomtest(round(mean * num_requests), num_requests)
    wilson = requests.proportion_ci(confidence, method="wilson")
    low, high = float(wilson.low), float(wilson.high)
    if number > 1:
        half = _quantile(confidence, number) * _deviation([run.share for run in runs])
        low, high = min(low, mean - half), max(high, mean + half)
    return Interval(max(low, 0.0), mean, min(high, 1.0))


def _quantile(confidence: float, number: int) -> float:
    """Student's, two-sided, of so many samples."""
    from scipy import stats

    return float(stats.t.ppf((1 + confidence) / 2, number - 1))


def _deviation(shares: Sequence[float]) -> float:
    """By how much one more sample differs from the mean of these."""
    number = len(shares)
    mean = fsum(shares) / number
    squares = fsum((share - mean) ** 2 for share in shares)
    return sqrt(squares / (number - 1) * (1 + 1 / number))


def most_sample_low(
    runs: Sequence[Attainment], num_runs: int, least: float, confidence: float
) -> float:
    """Returns the highest `low` that `sample_interval` can have once there are `num_runs`, of which
    these are the first and no other has a share below `least`.

    Mean less a multiple of the deviation is concave, so the others are alike where it is highest.
    """
    assert len(runs) < num_runs and num_runs > 1
    known = [run.share for run in runs]
    others = num_runs - len(runs)
    quantile = _quantile(confidence, num_runs)

    def low(other: float) -> float:
        shares = known + [other] * others
        return fsum(shares) / num_runs - quantile * _deviation(shares)

    begin, end = least, 1.0
    while end - begin > 1e-9:
        third = (end - begin) / 3
        if low(begin + third) < low(end - third):
            begin += third
        else:
            end -= third
    return low((begin + end) / 2)
