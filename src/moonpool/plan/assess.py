"""Simulates candidates and says how well they do: at a glance, or with confidence.

A glance is the first seed only. With confidence, seeds are added until the interval is clear of the
wanted share or they are used up. Runs are counted in whole traces, and there is an end to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.config import Config, ConfigError
from moonpool.plan.candidate import Candidate, Priced
from moonpool.plan.confidence import Interval, Verdict, interval
from moonpool.plan.trial import WHOLE, Outcome, Span, Trial
from moonpool.plan.workforce import Workforce
from moonpool.types import Struct

GIVE_UP = 0.03
"""A run ends early that can no longer come within this of the wanted share."""
SEEDS_AT_ONCE = 2
"""That are simulated: what a glance has seen comes on top."""
CLOSE = 0.01
SURE_FROM = 5
"""Seeds that it takes to meet by so little: of many looked at, some have three that agree by
chance, and it is those that are chosen."""
FUTILE_FROM = 3
"""Seeds that say on the average that it misses; no more are tried."""


class BudgetError(RuntimeError):
    """All simulations that were allowed have been run."""


class PlanGoal(Struct, frozen=True):
    wanted: float = 0.9
    confidence: float = 0.95
    max_seeds: int = 6
    max_runs: float = 80.0  # whole traces
    first_seed: int = 0


class Assessment(Struct, frozen=True):
    candidate: Candidate
    usd_per_h: float
    outcomes: tuple[Outcome, ...]  # by seed
    interval: Interval
    verdict: Verdict

    @property
    def gave_up(self) -> bool:
        return any(outcome.gave_up for outcome in self.outcomes)

    @property
    def ttft_p90_s(self) -> float:
        """Of those completed; the middle one of the seeds."""
        return sorted(outcome.ttft_p90_s for outcome in self.outcomes)[len(self.outcomes) // 2]

    def misses(self) -> dict[str, int]:
        """By cause, of all seeds."""
        total: dict[str, int] = {}
        for outcome in self.outcomes:
            for cause, number in outcome.misses.items():
                total[cause] = total.get(cause, 0) + number
        return total


class Assessor:
    """`tell` hears of what is being done and of the runs so far."""

    def __init__(
        self,
        workforce: Workforce,
        base: Config,
        goal: PlanGoal,
        priced: Priced,
        span: Span,
        span_runs: float,
        tell: Callable[[str, float], None] = lambda what, runs: None,
    ) -> None:
        """`span_runs`: the share of a whole run that a simulation of `span` takes."""
        self.goal = goal
        self.runs = 0.0
        self.allowed_runs = goal.max_runs  # until now; a stage may be given less than all
        self.known: dict[Candidate, Assessment] = {}
        self.doing = ""
        self._looks: dict[Candidate, Outcome] = {}
        self._workforce = workforce
        self._base = base
        self._priced = priced
        self._span = span
        self._span_runs = span_runs
        self._tell = tell

    def usd_per_h(self, candidate: Candidate) -> float:
        return self._priced.usd_per_h(candidate)

    def probe(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """The busiest part of the trace, first seed. Raises BudgetError, ConfigError."""
        trials = [self._trial(one, self.goal.first_seed, self._span) for one in candidates]
        return self._run(trials, self._span_runs)

    def glance(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """The whole trace, first seed. What has less of everything than one known to miss is not
        simulated, but misses alike. Raises BudgetError, ConfigError."""
        unknown = [one for one in candidates if one not in self._looks and not self._worse(one)]
        trials = [self._whole(one, self.goal.first_seed) for one in unknown]
        self._looks |= dict(zip(unknown, self._run(trials, 1.0), strict=True))
        found = []
        for one in candidates:
            outcome = self._looks.get(one) or self._worse(one)
            assert outcome is not None
            found.append(outcome)
        return found

    def judge(
        self, candidates: Sequence[Candidate], max_seeds: int | None = None
    ) -> list[Assessment]:
        """With confidence, all side by side. Raises BudgetError, ConfigError."""
        most = self.goal.max_seeds if max_seeds is None else max_seeds
        while True:
            open_ones = [one for one in dict.fromkeys(candidates) if self._is_open(one, most)]
            if not open_ones:
                return [self.known[one] for one in candidates]
            wanted = []
            for one in open_ones:
                done = len(self.known[one].outcomes) if one in self.known else 0
                seen = 1 if not done and one in self._looks else 0
                wanted += [(one, done + i) for i in range(min(seen + SEEDS_AT_ONCE, most - done))]
            seed = self.goal.first_seed
            outcomes = self._run([self._whole(one, seed + i) for one, i in wanted], 1.0)
            for one in open_ones:
                new = [o for (c, _), o in zip(wanted, outcomes, strict=True) if c == one]
                before = self.known[one].outcomes if one in self.known else ()
                self._note(one, (*before, *new))

    def in_full(self, candidate: Candidate) -> Outcome:
        """The first seed without giving up: to see where it breaks. Raises BudgetError."""
        return self._run([Trial(candidate.config(self._base), self.goal.first_seed)], 1.0)[0]

    def _is_open(self, candidate: Candidate, most: int) -> bool:
        found = self.known.get(candidate)
        if found is None:
            return True
        if len(found.outcomes) >= FUTILE_FROM and found.interval.mean < self.goal.wanted:
            return False  # more seeds would hardly make it meet: whether it misses is not asked
        by_chance = (
            len(found.outcomes) < SURE_FROM and found.interval.mean < self.goal.wanted + CLOSE
        )
        unsure = found.verdict is Verdict.UNCLEAR or (found.verdict is Verdict.MEETS and by_chance)
        return unsure and len(found.outcomes) < most

    def _note(self, candidate: Candidate, outcomes: tuple[Outcome, ...]) -> None:
        found = interval([o.attainment for o in outcomes], self.goal.confidence)
        self.known[candidate] = Assessment(
            candidate, self.usd_per_h(candidate), outcomes, found, found.verdict(self.goal.wanted)
        )

    def _worse(self, candidate: Candidate) -> Outcome | None:
        for other, outcome in self._looks.items():
            if outcome.share < self.goal.wanted and candidate.may_only_lose(other):
                return outcome
        return None

    def _whole(self, candidate: Candidate, seed: int) -> Trial:
        return self._trial(candidate, seed, WHOLE, max(self.goal.wanted - GIVE_UP, 0.0))

    def _trial(
        self, candidate: Candidate, seed: int, span: Span, give_up_below: float = 0.0
    ) -> Trial:
        return Trial(candidate.config(self._base), seed, 1.0, span, give_up_below)

    def _run(self, trials: Sequence[Trial], each: float) -> list[Outcome]:
        if trials and self.runs >= self.allowed_runs:
            raise BudgetError
        before, counted = self._workforce.num_run, self.runs

        def tell(done: int) -> None:
            self._tell(self.doing, counted + done * each)

        outcomes = self._workforce.run(trials, tell)
        self.runs += (self._workforce.num_run - before) * each
        for outcome in outcomes:
            if outcome.error:
                raise ConfigError(outcome.error)
        return outcomes
