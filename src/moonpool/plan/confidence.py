"""Computes the confidence interval of a share that several runs measured, and a verdict.

Runs are independent draws of the future, so their spread gives the interval (Student's t). Even if
the runs hardly differ, the interval is at least as wide as Wilson's for the same number of
independent requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from math import fsum, sqrt

from moonpool.types import Struct


class Attainment(Struct, frozen=True):
    """The requests of one run, and the requests completed within both SLOs.

    `num_requests` includes rejected and failed requests, `num_effective` does not.
    """

    num_requests: int
    num_effective: int

    @property
    def share(self) -> float:
        return self.num_effective / max(self.num_requests, 1)


class Verdict(Enum):
    """Whether a share reaches the wanted share, at the wanted confidence."""

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

    A single run has no spread: only its number of requests counts, which is too little to decide.
    """
    assert runs and 0 < confidence < 1
    num_requests = sum(run.num_requests for run in runs)
    num_effective = sum(run.num_effective for run in runs)
    mean = num_effective / max(num_requests, 1)
    low, high = _wilson(num_effective, max(num_requests, 1), confidence)
    if len(runs) > 1:
        freedom = len(runs) - 1
        squares = fsum((run.share - mean) ** 2 for run in runs)
        half = _quantile(confidence, len(runs)) * sqrt(squares / freedom / len(runs))
        low, high = min(low, mean - half), max(high, mean + half)
    return Interval(max(low, 0.0), mean, min(high, 1.0))


def sample_interval(runs: Sequence[Attainment], confidence: float) -> Interval:
    """Returns the two-sided interval of the share of one more sample like these samples.

    This interval is for one day alone, so it is wider than the interval of the mean of all days. It
    is at least as wide as Wilson's interval for one sample's number of independent requests.
    """
    assert runs and 0 < confidence < 1
    number = len(runs)
    mean = fsum(run.share for run in runs) / number
    num_requests = max(round(sum(run.num_requests for run in runs) / number), 1)
    low, high = _wilson(round(mean * num_requests), num_requests, confidence)
    if number > 1:
        half = _quantile(confidence, number) * _deviation([run.share for run in runs])
        low, high = min(low, mean - half), max(high, mean + half)
    return Interval(max(low, 0.0), mean, min(high, 1.0))


@cache
def _quantile(confidence: float, number: int) -> float:
    """Returns Student's two-sided quantile for this many samples."""
    from scipy.special import stdtrit  # because an import of scipy.stats takes a second

    return float(stdtrit(number - 1, (1 + confidence) / 2))


def _wilson(successes: int, number: int, confidence: float) -> tuple[float, float]:
    """Returns Wilson's two-sided interval of a share."""
    from scipy.special import ndtri

    z = float(ndtri(0.5 + 0.5 * confidence))
    share, denominator = successes / number, 2 * (number + z**2)
    center = (2 * number * share + z**2) / denominator
    delta = z / denominator * sqrt(4 * number * share * (1 - share) + z**2)
    low = 0.0 if successes == 0 else center - delta
    return low, 1.0 if successes == number else center + delta


def _deviation(shares: Sequence[float]) -> float:
    """Returns the expected difference between one more sample and the mean of these shares."""
    number = len(shares)
    mean = fsum(shares) / number
    squares = fsum((share - mean) ** 2 for share in shares)
    return sqrt(squares / (number - 1) * (1 + 1 / number))


def least_next_share(
    runs: Sequence[Attainment],
    num_runs: int,
    wanted: float,
    confidence: float,
    rounding: float,
    num_requests: int | None = None,
) -> float | None:
    """Returns the share that the next run must have, so that the `low` of `num_runs` runs of at
    least `wanted` each can reach `wanted`, within `rounding`. Returns None if `low` cannot reach
    it. `num_requests` is the mean number of requests of all runs, if known.

    The highest `low` is a concave function of that share, with its maximum where all further shares
    are equal.
    """
    known = [run.share for run in runs]
    least = wanted
    if num_requests is not None:
        mean = least_mean(num_requests, wanted - rounding, confidence)
        least = max(least, mean * num_runs - fsum(known) - (num_runs - len(known) - 1))
    most, alike = highest_low(known, num_runs, wanted, confidence)
    if most < wanted - rounding or least > 1.0 + rounding:
        return None
    begin, end = wanted, alike
    while end - begin > rounding:
        middle = (begin + end) / 2
        if highest_low([*known, middle], num_runs, wanted, confidence)[0] < wanted - rounding:
            begin = middle
        else:
            end = middle
    return max(begin, least - rounding)


@cache
def least_mean(num_requests: int, wanted: float, confidence: float) -> float:
    """Returns the least mean share at which this many independent requests have an interval above
    the wanted share, or a number above 1 if no share has."""
    low, high = 0, num_requests + 1  # counts below `low` are too few; counts from `high` on suffice
    while low < high:
        middle = (low + high) // 2
        if middle <= num_requests and _wilson(middle, num_requests, confidence)[0] < wanted:
            low = middle + 1
        else:
            high = middle
    return (low - 0.5) / num_requests


def highest_low(
    known: Sequence[float], num_runs: int, least: float, confidence: float
) -> tuple[float, float]:
    """Returns the highest `low` that `sample_interval` can have after `num_runs` runs, and the
    share of each further run at that point. The first runs have the `known` shares, and each
    further run has at least the share `least`.

    The mean minus a multiple of the deviation is concave, so it is highest if all further runs have
    equal shares.
    """
    others = num_runs - len(known)
    quantile = _quantile(confidence, num_runs)

    def low(other: float) -> float:
        shares = [*known, *[other] * others]
        return fsum(shares) / num_runs - quantile * _deviation(shares)

    begin, end = least, 1.0
    while others and end - begin > 1e-9:
        third = (end - begin) / 3
        if low(begin + third) < low(end - third):
            begin += third
        else:
            end -= third
    alike = (begin + end) / 2
    return low(alike), alike
