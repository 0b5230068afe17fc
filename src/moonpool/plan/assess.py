"""Simulates candidates on the original trace, and on further samples of its workload.

A candidate keeps the SLOs if the wanted share of the trace's requests meets them. Draws of the
trace then give the interval of that share. Each simulation counts as one run, even if it ends
early. The search ends at the limit of runs, at the time limit or with an interrupt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from moonpool.config.tables import Config, ConfigError
from moonpool.pages.units import given_percent
from moonpool.plan.candidate import Candidate, Priced
from moonpool.plan.confidence import Interval, least_next_share, sample_interval
from moonpool.plan.simulation_pool import SimulationPool
from moonpool.plan.time_left import TimeLeft
from moonpool.plan.trial import Outcome, StopRequestedError, Trial
from moonpool.sim.hardware.prices import Prices
from moonpool.types import Struct

FRESH_SEEDS_FROM = 1001
ROUNDING = 1e-6
"""An interval that ends below the goal by less than this counts as reaching the goal."""


class StoppedError(RuntimeError):
    """Says that the search ended early, and why."""


Report = Callable[[str, float, float | None], None]
"""Receives the stage in words, the number of runs so far, and the estimated seconds left."""


class PlanGoal(Struct, frozen=True):
    """The wanted attainment, the confidence of its interval, and the limits of the search."""

    wanted: float = 0.9
    confidence: float = 0.95
    num_draws: int = 6
    max_runs: float = 400.0  # a simulation that ends early counts in full
    first_seed: int = 0
    time_limit_s: float = float("inf")


class Assessment(Struct, frozen=True):
    """A candidate with its price, and its outcomes on the trace and on draws of the trace."""

    candidate: Candidate
    usd_per_h: float
    outcomes: tuple[Outcome, ...]  # the first outcome is of the original trace
    interval: Interval | None = None  # interval of another sample

    @property
    def share(self) -> float:
        """The attainment on the original trace, or an upper bound if the run ended early."""
        return self.outcomes[0].share

    @property
    def gave_up(self) -> bool:
        return self.outcomes[0].gave_up

    @property
    def ttft_p90_s(self) -> float:
        return self.outcomes[0].ttft_p90_s

    def meets(self, wanted: float) -> bool:
        return self.share >= wanted

    def misses(self) -> dict[str, int]:
        """Returns the misses on the trace by cause."""
        return self.outcomes[0].misses


class Assessor:
    """Runs simulations of candidates and remembers the outcomes.

    `clock` returns the time in seconds.
    """

    def __init__(
        self,
        pool_of_runs: SimulationPool,
        base: Config,
        goal: PlanGoal,
        priced: Priced,
        report: Report = lambda what, runs, left_s: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.goal = goal
        self.runs = 0.0
        self.doing = ""
        self.time_left = TimeLeft()
        self.looks: dict[Candidate, Outcome] = {}
        self._pool_of_runs = pool_of_runs
        self._base = base
        self._priced = priced
        self._report = report
        self._clock = clock
        self._began_s = clock()
        self._limit = 1.0
        self._any_ran = False

    def limit(self, share: float) -> None:
        """Allows only this share of the runs and of the time from now on."""
        self._limit = share

    @property
    def prices(self) -> Prices:
        return self._priced.prices

    def usd_per_h(self, candidate: Candidate) -> float:
        return self._priced.usd_per_h(candidate)

    def look(
        self, candidates: Sequence[Candidate], ahead: Sequence[Candidate] = ()
    ) -> list[Outcome]:
        """Simulates the original trace; a run ends once the candidate cannot keep the SLOs. Idle
        processes simulate the candidates `ahead`, which the search may look at next.

        If a candidate with more cache has failed by far, its outcome also counts for the candidate
        with less cache. Raises StoppedError, ConfigError.
        """
        unknown = self._unknown(candidates)
        trials = [self._trial(one, 0, self.goal.wanted) for one in unknown]
        likely = [self._trial(one, 0, self.goal.wanted) for one in self._unknown(ahead)]
        self.looks |= dict(zip(unknown, self._run(trials, likely), strict=True))
        found = []
        for one in candidates:
            outcome = self.looks.get(one) or self._more_failed(one)
            assert outcome is not None
            found.append(outcome)
        return found

    def look_faster(
        self, candidates: Sequence[Candidate], speed: float, after: float | None = None
    ) -> list[Outcome]:
        """Like `look`, but plays the trace at a multiple of its speed, and stores no outcome. The
        search will probably ask for the multiple `after` next."""
        trials = [self._trial(one, 0, self.goal.wanted) for one in candidates]
        change = msgspec.structs.replace
        ahead = [] if after is None else [change(one, speed=after) for one in trials]
        return self._run([change(one, speed=speed) for one in trials], ahead)

    def in_full_at(self, candidates: Sequence[Candidate], speed: float) -> list[Outcome]:
        """Simulates the trace at a multiple of its speed to its end; an outcome may be an error.
        Raises StoppedError."""
        trials = [self._trial(one, 0, 0.0) for one in candidates]
        self._any_ran = True
        return self._run([msgspec.structs.replace(one, speed=speed) for one in trials])

    def in_full(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Simulates the trace to its end. Raises StoppedError, ConfigError."""
        return self._run([self._trial(one, 0, 0.0) for one in candidates])

    def drawn(self, candidate: Candidate) -> Assessment:
        """Assesses the candidate on the trace and on all draws. Raises the errors of `look`."""
        seeds = range(1, self.goal.num_draws + 1)
        trials = [self._trial(candidate, seed, 0.0) for seed in seeds]
        outcomes = (*self.look([candidate]), *self._run(trials))
        return self._assessed(candidate, outcomes)

    def sure(
        self, candidate: Candidate, seeds: Sequence[int], num_requests: int | None = None
    ) -> Assessment | None:
        """Assesses the candidate on the draws of `seeds`, which have `num_requests` requests on
        average. Returns None if the candidate does not keep the SLOs at the wanted confidence.

        The simulations end once no later draws can make up for the draws so far, so the caller
        should give the draws first that are most likely to fail. Raises the errors of `look`.
        """
        known = self.looks.get(candidate) or self._more_failed(candidate)
        outcomes = [] if known is None else [known]
        asked = 0.0
        for number, seed in enumerate(seeds):
            least = self._least_share(outcomes, 1 + len(seeds), num_requests)
            if least is None:
                return None
            if number % 2 == 0:  # the next draw runs ahead, so both draws have the same goal
                asked = least
            ahead = [self._trial(candidate, later, asked) for later in seeds[number + 1 :][:1]]
            outcomes += self._run([self._trial(candidate, seed, asked)], ahead)
            if outcomes[-1].gave_up:
                return None
        if known is None:
            outcomes = [*self.look([candidate]), *outcomes]
            if outcomes[0].share < self.goal.wanted:
                return None
        assessment = self._assessed(candidate, tuple(outcomes))
        assert assessment.interval is not None
        return assessment if assessment.interval.low >= self.goal.wanted else None

    def _least_share(
        self, outcomes: Sequence[Outcome], num_runs: int, num_requests: int | None
    ) -> float | None:
        """Returns the share that the next draw must reach so that further draws can bring the
        interval of all runs above the goal, or None if they cannot."""
        wanted = self.goal.wanted
        if any(outcome.share < wanted for outcome in outcomes):
            return None
        runs = [outcome.attainment for outcome in outcomes]
        confidence = self.goal.confidence
        return least_next_share(runs, num_runs, wanted, confidence, ROUNDING, num_requests)

    def _assessed(self, candidate: Candidate, outcomes: tuple[Outcome, ...]) -> Assessment:
        found = sample_interval([one.attainment for one in outcomes], self.goal.confidence)
        return Assessment(candidate, self.usd_per_h(candidate), outcomes, found)

    def known(self, candidate: Candidate) -> Assessment:
        """Returns the assessment of a candidate from its run on the original trace alone."""
        return Assessment(candidate, self.usd_per_h(candidate), (self.looks[candidate],))

    def _unknown(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [
            one
            for one in dict.fromkeys(candidates)
            if one not in self.looks and self._more_failed(one) is None
        ]

    def _more_failed(self, candidate: Candidate) -> Outcome | None:
        for other, outcome in self.looks.items():
            if outcome.gave_up and not outcome.nearly() and candidate.may_only_lose(other):
                return outcome
        return None

    def _trial(self, candidate: Candidate, seed: int, give_up_below: float) -> Trial:
        seed += self.goal.first_seed
        return Trial(candidate.config(self._base), seed, give_up_below=give_up_below)

    def _stop(self) -> bool:
        return self._clock() - self._began_s > self._limit * self.goal.time_limit_s

    def _tell(self, runs: float) -> None:
        self.time_left.begin(self.doing.partition(",")[0], runs - 1)
        used_s = self._clock() - self._began_s
        left_s = self.time_left.seconds(runs, used_s)
        if left_s is not None:
            left_s = min(left_s, self.goal.time_limit_s - used_s)
        self._report(self.doing, runs, left_s)

    def _run(self, trials: Sequence[Trial], ahead: Sequence[Trial] = ()) -> list[Outcome]:
        if trials and self.runs >= self._limit * self.goal.max_runs:
            raise StoppedError("all allowed simulations were run; allow more with --runs")
        before, counted = self._pool_of_runs.num_run, self.runs
        try:
            outcomes = self._pool_of_runs.run(
                trials, lambda done: self._tell(counted + done), self._stop, ahead
            )
        except StopRequestedError:
            raise StoppedError("the time limit was reached; allow more with --time-limit") from None
        self.runs += self._pool_of_runs.num_run - before
        for outcome in outcomes:
            if outcome.error and not self._any_ran:
                raise ConfigError(outcome.error)  # later errors come from too small clusters
            self._any_ran = True
        return outcomes


class NeighbourFound(Struct, frozen=True):
    """A neighbour of a candidate; `change` says how it differs."""

    change: str
    assessment: Assessment


class PlanCheck(Struct, frozen=True):
    """The chosen cluster's results on fresh draws, which the search never saw, with the promised
    interval."""

    promised: Interval | None
    fresh: Assessment
    wanted: float

    @property
    def num_within(self) -> int:
        """The number of fresh draws within the promised interval."""
        if self.promised is None:
            return 0
        return sum(self.promised.low <= o.share <= self.promised.high for o in self.fresh.outcomes)

    @property
    def holds(self) -> bool:
        """Whether at most one fresh draw is outside the promised interval."""
        return self.num_within >= len(self.fresh.outcomes) - 1

    def conclusion(self) -> str:
        shares = [outcome.share for outcome in self.fresh.outcomes]
        mean = sum(shares) / len(shares)
        met = sum(share >= self.wanted for share in shares)
        verdict = "The promise holds" if self.holds else "The promise does not hold"
        return (
            f"{verdict}: {self.num_within} of {len(shares)} fresh draws are within it; they have"
            f" {mean:.1%} on average ({min(shares):.1%} to {max(shares):.1%}), and {met} of them"
            f" reach {given_percent(self.wanted)}."
        )


def check(choice: Assessment, assessor: Assessor) -> PlanCheck:
    """Simulates the choice on the fresh draws of `assessor`. Raises the errors of `look`."""
    assessor.doing = "fresh draws"
    fresh = assessor.drawn(choice.candidate)
    return PlanCheck(choice.interval, fresh, assessor.goal.wanted)
