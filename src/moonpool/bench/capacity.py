"""The highest rate at which the SLO holds, by bisection between rates that clearly do and do not.

What is measured, and where, is the caller's: `measure` may simulate or replay to a live cluster.
Each rate is measured with several seeds until the confidence interval of its attainment is clear
of what is wanted, or the seeds are used up; then nothing is claimed of that rate, and the search
closes in on it from either side. Nothing here draws, waits or prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Protocol

from moonpool.plan.confidence import Attainment, Interval, Verdict, interval
from moonpool.types import Struct

WIDEN = 2.0
MAX_WIDENINGS = 10
FIRST_SEEDS = 2
MORE_SEEDS = 2


class Measure(Protocol):
    def __call__(self, points: Sequence[tuple[float, int]]) -> Sequence[Attainment]:
        """Of each (rate, seed), in their order; at once where that is possible."""
        ...


def one_by_one(measure: Callable[[float, int], Attainment]) -> Measure:
    """Of what can only do one thing at a time, as a live cluster."""
    return lambda points: [measure(rate, seed) for rate, seed in points]


class Goal(Struct, frozen=True):
    """`wanted`: share of requests within both SLOs. Rates that are found lie within `tolerance` of
    each other, as a share. A rate is measured with up to `max_seeds`, from `first_seed` on."""

    wanted: float = 0.9
    confidence: float = 0.95
    tolerance: float = 0.05
    max_seeds: int = 6
    max_runs: int = 100
    first_seed: int = 0


class Point(Struct, frozen=True):
    rate: float
    runs: tuple[Attainment, ...]
    interval: Interval
    verdict: Verdict


class Capacity(Struct, frozen=True):
    """`holds`: the highest rate that clearly meets; `fails`: the lowest that clearly does not;
    0 and infinity where none was found. `estimate`: where the mean crosses, between two points."""

    holds: float
    fails: float
    estimate: float | None
    points: tuple[Point, ...]  # by rate
    num_runs: int
    ended: str  # "found", or which budget ended the search

    @property
    def unclear(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.verdict is Verdict.UNCLEAR)


class _SpentError(Exception):
    """No more runs are allowed."""


class _Search:
    def __init__(self, measure: Measure, goal: Goal, tell: Callable[[Point], None]) -> None:
        self.goal = goal
        self.points: dict[float, Point] = {}
        self.num_runs = 0
        self._measure = measure
        self._tell = tell

    def judge(self, rate: float) -> Verdict:
        """Measures until it is clear, or seeds or runs are used up (mutates)."""
        if rate in self.points:
            return self.points[rate].verdict
        goal, runs = self.goal, list[Attainment]()
        while True:
            wanted = FIRST_SEEDS if not runs else MORE_SEEDS
            number = min(wanted, goal.max_seeds - len(runs), goal.max_runs - self.num_runs)
            if number <= 0:
                break
            first = goal.first_seed + len(runs)
            runs += self._measure([(rate, first + i) for i in range(number)])
            self.num_runs += number
            if self._note(rate, runs) is not Verdict.UNCLEAR:
                break
        if rate not in self.points:
            raise _SpentError
        point = self.points[rate]
        self._tell(point)
        if point.verdict is Verdict.UNCLEAR and len(runs) < goal.max_seeds:
            raise _SpentError
        return point.verdict

    def _note(self, rate: float, runs: list[Attainment]) -> Verdict:
        found = interval(runs, self.goal.confidence)
        verdict = found.verdict(self.goal.wanted) if len(runs) > 1 else Verdict.UNCLEAR
        self.points[rate] = Point(rate, tuple(runs), found, verdict)
        return verdict

    # Where things stand. Noise may put a clear miss below a clear success; the lower one counts.

    @property
    def fails(self) -> float:
        rates = [r for r, point in self.points.items() if point.verdict is Verdict.MISSES]
        return min(rates, default=float("inf"))

    @property
    def holds(self) -> float:
        rates = [r for r, point in self.points.items() if point.verdict is Verdict.MEETS]
        return max((rate for rate in rates if rate < self.fails), default=0.0)

    def bracket(self, start: float) -> bool:
        """Widens until a rate holds and another fails; False if there is no end to it."""
        self.judge(start)
        for _ in range(MAX_WIDENINGS):
            if self.holds:
                break
            self.judge(min(self.points) / WIDEN)
        if not self.holds:
            return False
        for _ in range(MAX_WIDENINGS):
            if self.fails < float("inf"):
                return True
            self.judge(max(self.points) * WIDEN)
        return self.fails < float("inf")

    def close_in(self) -> None:
        """From below, then from above what cannot be told."""
        for holds_side in (True, False):
            while True:
                inner = [r for r in self.points if self.holds <= r <= self.fails]
                inner.sort()
                low, high = inner[:2] if holds_side else inner[-2:]
                if high <= low * (1 + self.goal.tolerance):
                    break
                self.judge(sqrt(low * high))


def search_capacity(
    measure: Measure,
    start: float,
    goal: Goal,
    tell: Callable[[Point], None] = lambda point: None,
) -> Capacity:
    """Begins at the rate `start`; `tell` hears of each rate when it is judged."""
    assert start > 0 and 0 < goal.wanted < 1 and goal.max_seeds >= FIRST_SEEDS
    assert goal.tolerance > 0
    search = _Search(measure, goal, tell)
    ended = "found"
    try:
        if search.bracket(start):
            search.close_in()
        else:
            ended = "no rate fails" if search.holds else "no rate holds"
    except _SpentError:
        ended = "runs used up"
    points = tuple(search.points[rate] for rate in sorted(search.points))
    return Capacity(
        search.holds, search.fails, _crossing(points, goal.wanted), points, search.num_runs, ended
    )


def _crossing(points: Sequence[Point], wanted: float) -> float | None:
    """Where the mean falls below what is wanted for the first time: straight between two points,
    over the logarithm of the rate."""
    for before, after in pairwise(points):
        above, below = before.interval.mean, after.interval.mean
        if above >= wanted > below:
            part = (above - wanted) / (above - below)
            return float(before.rate * (after.rate / before.rate) ** part)
    return None
