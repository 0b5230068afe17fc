"""Whether a plan stands up to fresh seeds: its choice and each neighbour one step away, simulated
with draws of the trace that the search never saw."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.plan.assess import Assessment, Assessor
from moonpool.plan.candidate import Candidate, neighbours
from moonpool.plan.confidence import Verdict
from moonpool.plan.search import NeighbourFound
from moonpool.types import Struct

FRESH_SEEDS_FROM = 1001
_BY_COST = ("instance", "cached tokens", "chunks of")


class Check(Struct, frozen=True):
    choice: Assessment
    neighbours: tuple[NeighbourFound, ...]

    @property
    def refuted_by(self) -> tuple[NeighbourFound, ...]:
        """Neighbours that are cheaper and clearly meet the SLOs."""
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
            return f"The choice does not stand: {share} is less than wanted."
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
        return f"{text}; too close to be told: with {', '.join(close)}." if close else f"{text}."


def check(choice: Candidate, assessor: Assessor, least_cache_tokens: int) -> Check:
    """One instance, one step of cache, one chunk size away, each as sure as seeds allow. Raises
    BudgetError, ConfigError."""
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
    return Check(
        assessor.known[choice],
        tuple(NeighbourFound(n.change, a) for n, a in zip(around, found, strict=True)),
    )
