"""Finds the highest rate at which the SLOs hold, in simulation or on a live server.

The search bisects between rates that clearly hold and clearly fail. `measure` may simulate or
replay to a live cluster (`LiveCapacity`). Each rate is measured with several seeds until the
confidence interval of its attainment excludes the wanted share. If the seeds are used up first, the
rate is unclear, and the search closes in on that rate from both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Protocol

from moonpool.http_client.client import HttpClient
from moonpool.plan.confidence import Attainment, Interval, Verdict, interval
from moonpool.trace.resample import resample
from moonpool.trace.row import TraceRow
from moonpool.types import Struct
from moonpool_lab.replay.run import ReplayPlan, run_replay
from moonpool_lab.replay.server import ServerFacts, ServerUnfitError, query_server

WIDEN = 2.0
MAX_WIDENINGS = 10
FIRST_SEEDS = 2
MORE_SEEDS = 2


class Measure(Protocol):
    def __call__(self, points: Sequence[tuple[float, int]]) -> Sequence[Attainment]:
        """Returns the attainment of each (rate, seed) in order; in parallel where possible."""
        ...


def one_by_one(measure: Callable[[float, int], Attainment]) -> Measure:
    """Makes a `Measure` of a function that measures one point at a time, such as a replay to a live
    cluster."""
    return lambda points: [measure(rate, seed) for rate, seed in points]


class CapacityGoal(Struct, frozen=True):
    """The goal of a capacity search. `wanted` is the share of requests that must meet both SLOs.

    The search ends when the rates that hold and fail lie within the relative `tolerance` of each
    other. A rate is measured with up to `max_seeds` seeds, from `first_seed` on.
    """

    wanted: float = 0.9
    confidence: float = 0.95
    tolerance: float = 0.05
    max_seeds: int = 6
    max_runs: int = 100
    first_seed: int = 0


class CapacityPoint(Struct, frozen=True):
    """One measured request rate."""

    rate: float
    runs: tuple[Attainment, ...]
    interval: Interval
    verdict: Verdict


class Capacity(Struct, frozen=True):
    """The result of a capacity search. `holds` is the highest rate that clearly meets the goal, or
    0 if no rate does. `fails` is the lowest rate that clearly misses the goal, or infinity if no
    rate does. `estimate` is the rate at which the mean attainment crosses `wanted`."""

    holds: float
    fails: float
    estimate: float | None
    points: tuple[CapacityPoint, ...]  # ordered by rate
    num_runs: int
    ended: str  # "found", or the name of the limit that ended the search

    @property
    def unclear(self) -> tuple[CapacityPoint, ...]:
        return tuple(point for point in self.points if point.verdict is Verdict.UNCLEAR)


class _SpentError(Exception):
    """Says that no more runs are allowed."""


class _Search:
    def __init__(
        self, measure: Measure, goal: CapacityGoal, report: Callable[[CapacityPoint], None]
    ) -> None:
        self.goal = goal
        self.points: dict[float, CapacityPoint] = {}
        self.num_runs = 0
        self._measure = measure
        self._report = report

    def judge(self, rate: float) -> Verdict:
        """Measures until the verdict is clear, or all seeds of the rate are used up. Raises
        _SpentError if the allowed runs end before that."""
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
        self._report(point)
        if point.verdict is Verdict.UNCLEAR and len(runs) < goal.max_seeds:
            raise _SpentError
        return point.verdict

    def _note(self, rate: float, runs: list[Attainment]) -> Verdict:
        found = interval(runs, self.goal.confidence)
        verdict = found.verdict(self.goal.wanted) if len(runs) > 1 else Verdict.UNCLEAR
        self.points[rate] = CapacityPoint(rate, tuple(runs), found, verdict)
        return verdict

    # Noise may put a clear miss below a clear success; the lower rate counts.

    @property
    def fails(self) -> float:
        rates = [r for r, point in self.points.items() if point.verdict is Verdict.MISSES]
        return min(rates, default=float("inf"))

    @property
    def holds(self) -> float:
        rates = [r for r, point in self.points.items() if point.verdict is Verdict.MEETS]
        return max((rate for rate in rates if rate < self.fails), default=0.0)

    def bracket(self, start: float) -> bool:
        """Doubles or halves the rate until one rate meets the goal and another misses it. Returns
        False if all rates meet the goal, or all miss it."""
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
        """Narrows the bracket below the unclear rates, then above them."""
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
    goal: CapacityGoal,
    report: Callable[[CapacityPoint], None] = lambda point: None,
) -> Capacity:
    """Searches from the rate `start`; `report` is called with each judged rate."""
    assert start > 0 and 0 < goal.wanted < 1 and goal.max_seeds >= FIRST_SEEDS
    assert goal.tolerance > 0
    search = _Search(measure, goal, report)
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


def _crossing(points: Sequence[CapacityPoint], wanted: float) -> float | None:
    """Returns the rate where the mean first falls below `wanted`, by linear interpolation over the
    logarithm of the rate."""
    for before, after in pairwise(points):
        above, below = before.interval.mean, after.interval.mean
        if above >= wanted > below:
            part = (above - wanted) / (above - below)
            return float(before.rate * (after.rate / before.rate) ** part)
    return None


class LiveCapacity:
    """Measures rates on a live server, by one replay after another.

    The server's own SLOs hold unless the caller gives SLOs, which a moonpool server then receives.
    """

    def __init__(
        self,
        url: str,
        rows: Sequence[TraceRow],
        block_tokens: int,
        slo_ttft_s: float | None = None,
        slo_tbt_s: float | None = None,
        api_key: str = "",
        ca_file: str = "",
    ) -> None:
        self._url = url
        self._api_key = api_key
        self._ca_file = ca_file
        self.rows = rows
        self._block_tokens = block_tokens
        self._slo = (slo_ttft_s, slo_tbt_s)
        self._num_runs = 0

    def check(self) -> int:
        """Leaves out requests that are too long for the server, and returns their number.

        Raises ServerUnfitError, ValueError.
        """
        most = asyncio.run(self._query()).max_model_tokens
        if most is None:
            return 0
        kept = [row for row in self.rows if row.input_tokens + row.output_tokens <= most]
        num_long = len(self.rows) - len(kept)
        if len(kept) < 2 or kept[-1].arrived_s <= 0:
            raise ServerUnfitError(
                f"nearly all requests are longer than the {most} tokens that {self._url} takes:"
                " scale them down with --scale-tokens, such as 1/16"
            )
        self.rows = kept
        return num_long

    async def _query(self) -> ServerFacts:
        client = HttpClient(self._url, self._api_key, ca_file=self._ca_file)
        try:
            return await query_server(client, None)
        finally:
            client.close()

    def measure(self, speed: float, seed: int) -> Attainment:
        """Replays at this speed. Raises ServerUnfitError, UnservableError or ValueError if the
        server has gone or no request can succeed. Raises KeyboardInterrupt after Ctrl-C."""
        self._num_runs += 1
        ttft_s, tbt_s = self._slo
        plan = ReplayPlan(
            url=self._url,
            api_key=self._api_key,
            ca_file=self._ca_file,
            rows=tuple(row.faster(speed) for row in resample(self.rows, seed)),
            block_tokens=self._block_tokens,
            slo_ttft_s=ttft_s,
            slo_tbt_s=tbt_s,
            # Each run has new tokens, so that no earlier run has left them in the cache.
            seed=self._num_runs,
        )
        figures = asyncio.run(run_replay(plan))
        if figures["interrupted"]:
            raise KeyboardInterrupt
        if not figures["completed"] and figures["errors"]:
            why = next(iter(figures["errors"]))
            raise ServerUnfitError(f"all {figures['requests']} requests failed; {why}")
        return Attainment(figures["requests"], figures["effective"])
