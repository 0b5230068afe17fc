"""Says what limits a plan's choice, and which SLO breaks with one instance fewer.

Causes and moments come from the misses in the simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.plan.assess import Assessment, NeighbourFound
from moonpool.plan.candidate import Candidate
from moonpool.plan.trial import Outcome, main_cause
from moonpool.types import Struct

WINDOW_MINUTES = 5
BINDS_SHARE = 0.005
"""If less than this share of requests misses the SLOs, the bottleneck is taken from the misses of
clusters with one instance fewer."""


class Moment(Struct, frozen=True):
    """The five minutes with the most misses. `at` is hours and minutes since the trace's start."""

    at: str
    missed: int
    arrived: int


class InstanceLossEffect(Struct, frozen=True):
    """The effect of one instance fewer: the outcome, the main cause of the misses, and the five
    minutes with the most misses."""

    change: str
    outcome: Outcome
    cause: str
    moment: Moment | None


def worst_moment(outcome: Outcome) -> Moment | None:
    """Returns the five minutes in which the most requests arrived that missed their SLOs, or None
    if none missed."""
    arrived = {minute: number for minute, number, _ in outcome.misses_by_minute}
    missed = {minute: number for minute, _, number in outcome.misses_by_minute}
    best: tuple[int, int] | None = None
    for first in sorted(arrived):
        number = sum(missed.get(first + i, 0) for i in range(WINDOW_MINUTES))
        if number and (best is None or number > best[0]):
            best = (number, first)
    if best is None:
        return None
    number, first = best
    return Moment(
        at=f"{first // 60:02d}:{first % 60:02d}",
        missed=number,
        arrived=sum(arrived.get(first + i, 0) for i in range(WINDOW_MINUTES)),
    )


def broken_by_fewer(
    around: Sequence[NeighbourFound], in_full: Callable[[Sequence[Candidate]], list[Outcome]]
) -> list[InstanceLossEffect]:
    """Returns the effects of the neighbours with one instance fewer, the worst first.

    `in_full` simulates candidates to the end, because an early end would hide the moment.
    """
    fewer = [one for one in around if one.change.endswith("instance fewer")]
    outcomes = {one.change: one.assessment.outcomes[0] for one in fewer}
    ended_early = [one for one in fewer if outcomes[one.change].gave_up]
    whole = in_full([one.assessment.candidate for one in ended_early])
    outcomes |= {one.change: outcome for one, outcome in zip(ended_early, whole, strict=True)}
    found = [
        InstanceLossEffect(change, outcome, main_cause(outcome.misses), worst_moment(outcome))
        for change, outcome in outcomes.items()
    ]
    return sorted(found, key=lambda one: one.outcome.share)


def binding(choice: Assessment, fewer: Sequence[InstanceLossEffect]) -> str:
    """Returns the bottleneck of the choice, or "" if no request misses with one instance fewer."""
    misses = choice.misses()
    if sum(misses.values()) >= BINDS_SHARE * choice.outcomes[0].attainment.num_requests:
        return main_cause(misses)
    return next((one.cause for one in fewer if one.cause), "")
