"""Simulates candidates and judges them: at a glance or with confidence; and checks a choice.

A glance is one run with the first seed. With confidence, seeds are added until the interval
excludes the wanted share or all seeds are used. Runs are counted in whole traces, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.config import Config, ConfigError
from moonpool.plan.candidate import Candidate, Priced, neighbours
from moonpool.plan.confidence import Interval, Verdict, interval
from moonpool.plan.trial import WHOLE, Outcome, Span, Trial
from moonpool.plan.workforce import Workforce
from moonpool.types import Struct

GIVE_UP = 0.03
"""A run ends early once its share must stay this far below the wanted one."""
SEEDS_AT_ONCE = 2
"""Seeds to simulate in one round, in addition to that of a glance."""
CLOSE = 0.01
SURE_FROM = 5
"""Seeds needed to meet by less than CLOSE: of many candidates, some have three seeds that agree by
chance, and the search would choose those."""
FUTILE_FROM = 3
"""Seeds after which a candidate that misses on average gets no more."""


class BudgetError(RuntimeError):
    """All allowed simulations have been run."""


class PlanGoal(Struct, frozen=True):
    """The wanted attainment, its confidence, and the limits of the search."""

    wanted: float = 0.9
    confidence: float = 0.95
    max_seeds: int = 6
    max_runs: float = 80.0  # whole traces
    first_seed: int = 0


class Assessment(Struct, frozen=True):
    """A candidate with its price, its outcomes by seed, and the verdict on them."""

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
        """P90 of the TTFT of completed requests; the median of the seeds."""
        return sorted(outcome.ttft_p90_s for outcome in self.outcomes)[len(self.outcomes) // 2]

    def misses(self) -> dict[str, int]:
        """Returns the misses of all seeds by cause."""
        total: dict[str, int] = {}
        for outcome in self.outcomes:
            for cause, number in outcome.misses.items():
                total[cause] = total.get(cause, 0) + number
        return total


class Assessor:
    """Runs simulations of candidates and remembers them.

    `report` is called with the current stage and the runs so far.
    """

    def __init__(
        self,
        workforce: Workforce,
        base: Config,
        goal: PlanGoal,
        priced: Priced,
        span: Span,
        span_runs: float,
        report: Callable[[str, float], None] = lambda what, runs: None,
    ) -> None:
        """`span_runs`: the cost of a simulation of `span`, as a share of a whole run."""
        self.goal = goal
        self.runs = 0.0
        self.allowed_runs = goal.max_runs  # a stage may be limited further
        self.known: dict[Candidate, Assessment] = {}
        self.doing = ""
        self._looks: dict[Candidate, Outcome] = {}
        self._workforce = workforce
        self._base = base
        self._priced = priced
        self._span = span
        self._span_runs = span_runs
        self._report = report

    def usd_per_h(self, candidate: Candidate) -> float:
        return self._priced.usd_per_h(candidate)

    def probe(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Simulates the busiest part of the trace with the first seed.

        Raises BudgetError, ConfigError.
        """
        trials = [self._trial(one, self.goal.first_seed, self._span) for one in candidates]
        return self._run(trials, self._span_runs)

    def glance(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Simulates the whole trace with the first seed.

        A candidate with no more of anything than one known to miss is not simulated: it gets that
        outcome. Raises BudgetError, ConfigError.
        """
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
        """Assesses all candidates with confidence, in parallel. Raises BudgetError, ConfigError."""
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
        """Simulates the first seed to its end. Raises BudgetError, ConfigError."""
        return self._run([Trial(candidate.config(self._base), self.goal.first_seed)], 1.0)[0]

    def _is_open(self, candidate: Candidate, most: int) -> bool:
        found = self.known.get(candidate)
        if found is None:
            return True
        if len(found.outcomes) >= FUTILE_FROM and found.interval.mean < self.goal.wanted:
            return False  # more seeds would hardly make it meet
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

        def count(done: int) -> None:
            self._report(self.doing, counted + done * each)

        outcomes = self._workforce.run(trials, count)
        self.runs += (self._workforce.num_run - before) * each
        for outcome in outcomes:
            if outcome.error:
                raise ConfigError(outcome.error)
        return outcomes


class NeighbourFound(Struct, frozen=True):
    """A neighbour of a candidate; `change` says how it differs."""

    change: str
    assessment: Assessment


FRESH_SEEDS_FROM = 1001
_BY_COST = ("instance", "cached tokens", "chunks of")


class PlanCheck(Struct, frozen=True):
    """The choice and its neighbours with seeds that the search never saw."""

    choice: Assessment
    neighbours: tuple[NeighbourFound, ...]

    @property
    def refuted_by(self) -> tuple[NeighbourFound, ...]:
        """Returns the neighbours that are cheaper and clearly meet the SLOs."""
        return tuple(
            one
            for one in self.neighbours
            if one.assessment.usd_per_h < self.choice.usd_per_h
            and one.assessment.verdict is Verdict.MEETS
        )

    @property
    def holds(self) -> bool:
        return self.choice.verdict is not Verdict.MISSES and not self.refuted_by

    def conclusion(self) -> str:
        share = f"{self.choice.interval.mean:.1%} ({self.choice.interval.low:.1%} to"
        share += f" {self.choice.interval.high:.1%}) with {len(self.choice.outcomes)} fresh seeds"
        if self.choice.verdict is Verdict.MISSES:
            return f"The choice does not hold: {share} is less than wanted."
        sure = "meets" if self.choice.verdict is Verdict.MEETS else "is too close to tell"
        if self.refuted_by:
            names = ", ".join(one.change for one in self.refuted_by)
            return (
                f"The choice {sure}, {share}, but is not the cheapest: with {names} it meets too."
            )
        close = [
            one.change
            for one in self.neighbours
            if one.assessment.usd_per_h < self.choice.usd_per_h
            and one.assessment.verdict is Verdict.UNCLEAR
        ]
        text = f"The choice {sure}, {share}, and no cheaper neighbour does"
        return f"{text}; too close to tell: with {', '.join(close)}." if close else f"{text}."


def check(choice: Candidate, assessor: Assessor, least_cache_tokens: int) -> PlanCheck:
    """Assesses the choice and each neighbour one step away in instances, cache or chunk size, with
    seeds that the search never saw. Raises BudgetError, ConfigError."""
    assessor.doing = "fresh seeds"
    around = [
        one
        for one in neighbours(choice, least_cache_tokens)
        if any(word in one.change for word in _BY_COST)
    ]
    price = assessor.usd_per_h
    cheaper = [one.candidate for one in around if price(one.candidate) < price(choice)]
    assessor.judge([choice, *cheaper])
    found: Sequence[Assessment] = assessor.judge([one.candidate for one in around], max_seeds=2)
    return PlanCheck(
        assessor.known[choice],
        tuple(NeighbourFound(n.change, a) for n, a in zip(around, found, strict=True)),
    )
