"""Writes a plan's answer in a planner's words: what to buy, its cost, the load that it bears, and
what breaks first. Each answer explains the technical words that it uses."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from moonpool.config.slo import SloConfig
from moonpool.pages.units import given_percent
from moonpool.plan.advice import WINDOW_MINUTES, InstanceLossEffect, binding
from moonpool.plan.assess import Assessment, PlanGoal
from moonpool.plan.candidate import Candidate, Priced, tokens
from moonpool.plan.demand import Demand, Prepared
from moonpool.plan.room import Room
from moonpool.plan.running_costs import costs_of
from moonpool.plan.search import ClusterPlan
from moonpool.plan.trial import Cause, main_cause
from moonpool.types import Struct

HOURS_A_MONTH = 730
LABEL_WIDTH = 14
TEXT_WIDTH = 100
_ROLES = (
    ("prefill", "a prefill instance computes prompts"),
    ("decode", "a decode instance writes the answers"),
    ("mixed", "a mixed instance computes prompts and writes the answers"),
)
CAUSES = {
    Cause.PREFILL.value: "first tokens come too late: time to compute prompts is short",
    Cause.DECODE_SPEED.value: "the tokens of answers follow too slowly",
    Cause.DECODE_MEMORY.value: "memory for answers that are written at the same time is short",
    Cause.POOL.value: "the cache of prompts is too small for those that run",
    Cause.DEADLINE.value: "requests reach their deadline before they are answered",
}
"""Each cause of misses in words for readers who do not know the technical terms."""


class PlanAnswer(Struct, frozen=True):
    """The parts of an answer, each a label and its sentences. The first part says what to buy, or
    that no cluster was found."""

    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """All sentences in one text."""
        (first, bought), *others = self.parts
        begin = f"{first} {bought}" if first else bought
        return " ".join([begin, *(f"{label}: {text}" for label, text in others)])

    def figures(self) -> dict[str, Any]:
        """The answer in the form of `--json`."""
        parts = [{"label": label, "text": text} for label, text in self.parts]
        return {"advice": self.text, "answer": parts}

    def lines(self) -> Iterator[str]:
        """Yields the answer for a terminal, with the labels in their own column."""
        for label, text in self.parts:
            found = textwrap.wrap(text, TEXT_WIDTH - LABEL_WIDTH)
            for number, line in enumerate(found):
                yield f"{'' if number else label:<{LABEL_WIDTH}}{line}"


def answer(
    plan: ClusterPlan,
    fewer: Sequence[InstanceLossEffect],
    goal: PlanGoal,
    prepared: Prepared,
    priced: Priced,
) -> PlanAnswer:
    """Returns the answer of a search."""
    choice, slo = plan.choice, prepared.base.slo
    if choice is None:
        return PlanAnswer((("", _nothing(plan, slo, goal.wanted)),))
    parts = [
        ("Buy", _bought(choice.candidate, prepared, priced)),
        ("Costs", _costs(choice, prepared, priced)),
        ("Holds", _holds(plan, choice, prepared, goal)),
        ("Breaks first", _breaks(plan, choice, fewer, goal.wanted)),
    ]
    if plan.sure is not None and plan.sure.candidate != choice.candidate:
        sure = plan.sure
        named = f"{priced.words(sure.candidate)}, with {_pool(sure.candidate, priced)}"
        price = f"{sure.usd_per_h:,.2f} USD/h"
        parts.append(
            (
                "To be sure",
                f"At {given_percent(goal.confidence)} confidence, buy {named}, for {price}.",
            )
        )
    return PlanAnswer(tuple(parts))


def slo_words(slo: SloConfig) -> str:
    """Returns the service levels in words, with an explanation of TTFT and TBT."""
    usual = slo.usual
    text = (
        f"the first token within {usual.ttft_s:g} s (TTFT, time to first token), the others"
        f" within {usual.tbt_s:g} s of each other (TBT, time between tokens)"
    )
    for one in slo.classes:
        text += f"; of class {one.name}, within {one.ttft_s:g} s and {one.tbt_s:g} s"
    return text


def _bought(one: Candidate, prepared: Prepared, priced: Priced) -> str:
    roles = [words for role, words in _ROLES if getattr(one, role)]
    text = f"{priced.words(one)}, with {_pool(one, priced)}."
    text += f" An instance is one copy of {prepared.base.hardware.shape};"
    text += f" {', and '.join(roles)}."
    if prepared.shares_prefixes:
        text += " DRAM keeps the KVCache of prompts that begin alike, which are not computed again."
        return text
    return f"{text} The requests share no prefixes: the DRAM only holds those that run."


def _pool(one: Candidate, priced: Priced) -> str:
    """Returns DRAM and SSD of all instances in words, with the tokens that they hold."""
    number, size = one.num_instances, priced.pool_bytes
    text = f"DRAM for {tokens(one.cache_tokens * number)} cached tokens"
    text += f" ({_gigabytes(size(one, one.cache_tokens))})"
    if one.ssd_tokens:
        text += f" and SSD for {tokens(one.ssd_tokens * number)}"
        text += f" ({_gigabytes(size(one, one.ssd_tokens))})"
    return text


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:,.1f} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:,.3g} GB"


def _costs(choice: Assessment, prepared: Prepared, priced: Priced) -> str:
    costs: dict[str, Any] = costs_of(choice, prepared, priced)
    text = f"{choice.usd_per_h:,.2f} USD/h, {choice.usd_per_h * HOURS_A_MONTH:,.0f} USD a month"
    usd = costs["usd_per_million_tokens"]["all"]
    if usd is not None:
        text += f"; {usd:.3g} USD per million tokens of prompts and answers at the trace's load"
    if costs["power_kw"] is not None:
        text += f". Its devices draw at most {costs['power_kw']:.3g} kW"
    return f"{text}."


def _holds(plan: ClusterPlan, choice: Assessment, prepared: Prepared, goal: PlanGoal) -> str:
    demand = prepared.demand
    text = (
        f"{_up_to(plan.rooms, demand)}{choice.share:.1%} of the trace's requests keep both SLOs:"
        f" {slo_words(prepared.base.slo)}. The goal is {given_percent(goal.wanted)}"
    )
    classes = choice.outcomes[0].classes
    if prepared.base.slo.classes and len(classes) > 1:
        shares = [
            f"{one.name or 'others'} {one.num_effective / max(one.num_requests, 1):.1%}"
            for one in classes
        ]
        text += f" in each class ({', '.join(shares)})"
    if choice.interval is not None:
        low, high = choice.interval.low, choice.interval.high
        text += f"; another sample like the trace has {low:.1%} to {high:.1%}"
    return f"{text}."


def _up_to(rooms: Sequence[Room], demand: Demand) -> str:
    """Returns in words how much load the choice (the first entry of `rooms`) bears, and how much
    the next cluster at the same price bears."""
    load = demand.load_words
    if not rooms or (demand.at_once and rooms[0].missed is None):
        return f"The trace's load of {load}. "
    choice, *others = rooms
    text = f"Up to {choice.kept:g} times the trace's load of {load}"
    if choice.missed is None:
        text += "; more was not tried"
    elif choice.kept == 1.0:
        text = f"The trace's load of {load}, and not {choice.missed:g} times as much"
    else:
        text += f", and not {choice.missed:g} times"
    if others:
        text += f" (of the others at this price, {others[0].candidate.roles} holds up to"
        text += f" {others[0].kept:g} times)"
    return f"{text}. "


def _breaks(
    plan: ClusterPlan, choice: Assessment, fewer: Sequence[InstanceLossEffect], wanted: float
) -> str:
    found = []
    if plan.rooms and plan.rooms[0].missed is not None and plan.rooms[0].lacked:
        room = plan.rooms[0]
        found.append(f"At {room.missed:g} times the load, {CAUSES[room.lacked]}.")
    elif cause := binding(choice, fewer):
        found.append(f"With more load, {CAUSES[cause]}.")
    found += [_broken(broken, wanted) for broken in fewer]
    if not found and plan.stopped:
        return "Not known: the search ended before it tried more load, or an instance fewer."
    return " ".join(found) or "Nothing that was tried."


def _broken(broken: InstanceLossEffect, wanted: float) -> str:
    change, share = f"With {broken.change}", broken.outcome.share
    if share >= wanted:
        return f"{change}, {share:.1%} still keep the SLOs, at no lower price."
    if broken.moment is None:
        return f"{change}, {share:.1%} are left."
    moment = broken.moment
    return (
        f"{change}, {share:.1%} are left: {CAUSES[broken.cause]}, and at {moment.at} (hours and"
        f" minutes of the trace) {moment.missed} of {moment.arrived} requests miss within"
        f" {WINDOW_MINUTES} minutes."
    )


def _nothing(plan: ClusterPlan, slo: SloConfig, wanted: float) -> str:
    """Returns the answer for a search that found no cluster."""
    text = (
        f"No cluster was found in which {given_percent(wanted)} of requests keep both SLOs:"
        f" {slo_words(slo)}"
    )
    if plan.assessed:
        best = max(plan.assessed, key=lambda one: one.outcomes[0].how_far())
        cause = main_cause(best.misses())
        less = "less than " if best.gave_up else ""
        text += f". Nearest came {best.candidate.roles} of {best.candidate.hardware}, with"
        text += f" {less}{best.share:.1%}"
        text += f": {CAUSES[cause]}" if cause else ""
    if plan.stopped:
        return f"{text}. The search ended early: {plan.stopped}."
    return f"{text}. Raise the SLOs, lower --attainment, or name other --devices."
