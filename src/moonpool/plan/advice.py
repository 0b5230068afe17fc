"""A plan in words: what to buy, what limits it, and which SLO one instance fewer breaks.

Causes and moments are those of the misses in the simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.plan.assess import Assessment, NeighbourFound, PlanGoal
from moonpool.plan.candidate import Candidate, Priced, tokens
from moonpool.plan.room import Room
from moonpool.plan.search import ClusterPlan
from moonpool.plan.trial import Cause, Outcome
from moonpool.types import Slo, Struct

WINDOW_MINUTES = 5
BINDS_SHARE = 0.005
"""If fewer than this share of the requests miss, the bottleneck is taken from the neighbours."""
_SLO = {
    Cause.PREFILL.value: "the TTFT SLO",
    Cause.DECODE_SPEED.value: "the TBT SLO",
    Cause.DECODE_MEMORY.value: "the memory of decode",
    Cause.POOL.value: "the pool's room",
    Cause.DEADLINE.value: "the deadline",
}


class Moment(Struct, frozen=True):
    """The five minutes with most misses; `at` is hours and minutes since the trace's start."""

    at: str
    missed: int
    arrived: int


class InstanceLossEffect(Struct, frozen=True):
    """The effect of one instance fewer: its outcome, the main cause of misses, and when."""

    change: str
    outcome: Outcome
    cause: str
    moment: Moment | None


def worst_moment(outcome: Outcome) -> Moment | None:
    """Returns the five minutes whose arrivals missed most often; None if none missed."""
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


def main_cause(misses: dict[str, int]) -> str:
    """Returns the most frequent cause; "" if there are no misses."""
    return max(sorted(misses), key=lambda cause: misses[cause], default="")


def broken_by_fewer(
    around: Sequence[NeighbourFound], in_full: Callable[[Candidate], Outcome]
) -> list[InstanceLossEffect]:
    """Returns the effects of the neighbours with one instance fewer, the worst first.

    `in_full` simulates a candidate to the end, where an early end would hide the moment.
    """
    found = []
    for neighbour in around:
        if not neighbour.change.endswith("instance fewer"):
            continue
        assessment = neighbour.assessment
        outcome = assessment.outcomes[0]
        if outcome.gave_up:
            outcome = in_full(assessment.candidate)
        found.append(
            InstanceLossEffect(
                neighbour.change,
                outcome,
                main_cause(outcome.misses),
                worst_moment(outcome),
            )
        )
    return sorted(found, key=lambda one: one.outcome.share)


def binding(choice: Assessment, fewer: Sequence[InstanceLossEffect]) -> str:
    """Returns the bottleneck of the choice; "" if nothing lacks even with an instance less."""
    misses = choice.misses()
    if sum(misses.values()) >= BINDS_SHARE * choice.outcomes[0].attainment.num_requests:
        return main_cause(misses)
    return next((one.cause for one in fewer if one.cause), "")


def sentence(
    plan: ClusterPlan,
    fewer: Sequence[InstanceLossEffect],
    slo: Slo,
    goal: PlanGoal,
    shares_prefixes: bool,
    priced: Priced,
) -> str:
    """Returns the advice in a few sentences."""
    choice = plan.choice
    if choice is None:
        return nothing(plan, slo, goal.wanted)
    text = (
        f"Buy {_named(choice, priced)}: {choice.share:.1%} of the trace's requests meet TTFT"
        f" {slo.ttft_s:g} s and TBT {slo.tbt_s:g} s"
    )
    if choice.interval is not None:
        low, high = choice.interval.low, choice.interval.high
        text += f"; another sample like it has {low:.1%} to {high:.1%}"
    text += "."
    if plan.rooms:
        text += f" {_room(plan.rooms)}"
    if not shares_prefixes:
        text += " The requests share no prefixes: the pool only holds those that run."
    if plan.sure is not None and plan.sure.candidate != choice.candidate:
        text += f" To be {goal.confidence:.0%} sure, buy {_named(plan.sure, priced)}."
    binds = binding(choice, fewer)
    if binds:
        text += f" {binds.capitalize()} is what binds."
    for broken in fewer:
        text += f" {_broken(broken, goal.wanted)}"
    return text


def _named(found: Assessment, priced: Priced) -> str:
    one = found.candidate
    text = f"{priced.words(one)}, with {tokens(one.cache_tokens * one.num_instances)}"
    text += " tokens of DRAM"
    if one.ssd_tokens:
        text += f" and {tokens(one.ssd_tokens * one.num_instances)} tokens of SSD"
    return f"{text}, for {found.usd_per_h:,.2f} USD/h"


def _room(found: Sequence[Room]) -> str:
    """The load that the choice bears beyond the trace, beside the next cluster at its price."""
    choice, *others = found
    if choice.missed is None:
        text = f"It keeps the SLOs at {choice.kept:g} times the trace's speed"
    elif choice.kept > 1.0:
        text = (
            f"It keeps the SLOs at {choice.kept:g} times the trace's speed, not at"
            f" {choice.missed:g} times"
        )
    else:
        text = f"It misses the SLOs at {choice.missed:g} times the trace's speed"
    if others:
        text += f"; of the others at this price, {others[0].candidate.roles} keeps them at"
        text += f" {others[0].kept:g} times"
    return f"{text}."


def _broken(broken: InstanceLossEffect, wanted: float) -> str:
    change, share = broken.change.capitalize(), broken.outcome.share
    if share >= wanted:
        return f"{change} still gives {share:.1%}, at no lower price."
    if broken.moment is None:
        return f"{change} leaves {share:.1%}."
    moment = broken.moment
    return (
        f"{change} breaks {_SLO[broken.cause]}: {share:.1%} are left, and at {moment.at}"
        f" {moment.missed} of {moment.arrived} requests miss within {WINDOW_MINUTES} minutes."
    )


def nothing(plan: ClusterPlan, slo: Slo, wanted: float) -> str:
    """Returns the advice where no cluster was found."""
    text = (
        f"No cluster was found in which {wanted:.0%} of requests meet TTFT {slo.ttft_s:g} s"
        f" and TBT {slo.tbt_s:g} s"
    )
    if plan.assessed:
        best = max(plan.assessed, key=lambda one: one.outcomes[0].how_far())
        cause = main_cause(best.misses())
        text += (
            f"; nearest came {best.candidate.roles} of {best.candidate.hardware}, with"
            f" {'less than ' if best.gave_up else ''}{best.share:.1%}, short of"
            f" {cause or 'nothing else'}"
        )
    if plan.stopped:
        return f"{text}: {plan.stopped}."
    return f"{text}: raise the SLOs, lower --attainment, or name other --devices."
