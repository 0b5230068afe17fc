"""Prints a plan as tables, and makes its figures for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import click
import msgspec

from moonpool.distributions import rounded
from moonpool.pages.units import counted, given_percent
from moonpool.plan.advice import InstanceLossEffect, binding, worst_moment
from moonpool.plan.answer import PlanAnswer
from moonpool.plan.assess import Assessment, NeighbourFound, PlanCheck, PlanGoal
from moonpool.plan.candidate import Candidate, Priced, tokens
from moonpool.plan.demand import Prepared
from moonpool.plan.offloading import Balance, DecodeNode
from moonpool.plan.running_costs import cost_lines, costs_of
from moonpool.plan.search import ClusterPlan, MixFound
from moonpool.plan.trial import main_cause

UNTRIED_MIXES = 6
FRONT_ROWS = 12


def print_plan(plan: ClusterPlan, found: PlanAnswer, wanted: float, costs: dict[str, Any]) -> None:
    """Prints the answer, the neighbours, the front and the mixes of hardware."""
    if plan.stopped and plan.choice is not None:
        runs = counted(round(plan.runs), "run")
        click.echo(f"ended early after {runs}: {plan.stopped}; the best so far:")
    for line in found.lines():
        click.echo(line)
    choice = plan.choice
    if choice is not None:
        click.echo(f"\n{_settings(choice.candidate)}")
        for line in cost_lines(costs):
            click.echo(line)
        if plan.neighbours:
            click.echo("\nnext to it (other clusters, one step away)")
        _print_neighbours(plan.neighbours, choice, wanted)
    front = plan.front()[-FRONT_ROWS:]
    if front:
        click.echo(
            f"\nof those tried, nothing cheaper attains as much (wanted: {given_percent(wanted)})"
        )
    width = max((len(_what(each.candidate)) for each in front), default=0)
    for each in front:
        click.echo(f"  {_row(each, wanted, width)}")
    click.echo("\nhardware")
    for line in _mixes(plan.mixes):
        click.echo(f"  {line}")
    if plan.num_left:
        why = "" if plan.stopped else "; none was expected to keep the SLOs"
        click.echo(
            f"\n{plan.num_left} cheaper arrangements were neither simulated nor excluded{why}"
        )


def _settings(one: Candidate) -> str:
    ssd = f", {tokens(one.ssd_tokens)} tokens of SSD" if one.ssd_tokens else ""
    return (
        f"settings: prompts computed in chunks of {one.chunk_tokens} tokens; placement"
        f" {one.placement}, admission {one.admission}, eviction {one.eviction};"
        f" {tokens(one.cache_tokens)} tokens of DRAM{ssd} an instance"
    )


def print_offloading(words: str, nodes: Sequence[DecodeNode], prepared: Prepared) -> dict[str, Any]:
    """Prints the result and returns its figures."""
    slo, context = prepared.base.slo.usual, prepared.context_tokens
    click.echo(
        f"\n{words}\n\none decode node, by the cost model: contexts of {context:,} tokens, TBT"
        f" within {slo.tbt_s:g} s"
    )
    for node in nodes:
        bound = "memory" if node.full else "time"
        click.echo(
            f"  {node.kind!s:<28} {node.usd_per_h:>8.2f} USD/h  {tokens(node.kv_tokens):>6} tokens"
            f" of KVCache  batch {node.batch:>4} (bound by {bound}), {1e3 * node.step_s:.1f} ms,"
            f" {node.tokens_per_usd / 1e6:.2f}M tokens per USD"
        )
        if node.balance is not None:
            click.echo(f"    {_balance(node.balance)}")
    return {
        "offloading": {
            "verdict": words,
            "nodes": [
                msgspec.to_builtins(node) | {"tokens_per_usd": rounded(node.tokens_per_usd)}
                for node in nodes
            ],
        }
    }


def _balance(found: Balance) -> str:
    return (
        f"per layer and batch: model {1e6 * found.model_s:.0f} us, attention"
        f" {1e6 * found.attention_s:.0f} us, wire {1e6 * found.wire_s:.0f} us: {found.slower} is"
        f" the slower side; the wire needs {found.least_bytes_per_s / 1e9:.1f} GB/s and has"
        f" {found.wire_bytes_per_s / 1e9:.1f}"
    )


def print_check(check: PlanCheck) -> dict[str, Any]:
    """Prints the result and returns its figures."""
    click.echo(f"\nchecked with fresh draws\n{check.conclusion()}")
    return {
        "holds": check.holds,
        "conclusion": check.conclusion(),
        "promised": msgspec.to_builtins(check.promised),
        "shares": [rounded(outcome.share) for outcome in check.fresh.outcomes],
    }


def _print_neighbours(around: Sequence[NeighbourFound], choice: Assessment, wanted: float) -> None:
    for neighbour in around:
        found = neighbour.assessment
        more = found.usd_per_h - choice.usd_per_h
        price = "same price" if not more else f"{more:+.2f} USD/h"
        cause = main_cause(found.misses())
        lacks = f"; lacks {cause}" if cause and not found.meets(wanted) else ""
        click.echo(f"  {neighbour.change:<34} {price:>14}  {_attained(found, wanted)}{lacks}")


def _row(found: Assessment, wanted: float, width: int) -> str:
    what = _what(found.candidate)
    return f"{what:<{width}} {found.usd_per_h:>9.2f} USD/h  {_attained(found, wanted)}"


def _what(one: Candidate) -> str:
    ssd = f" + {tokens(one.ssd_tokens)} tokens SSD" if one.ssd_tokens else ""
    return (
        f"{one.roles}, {one.hardware}, {tokens(one.cache_tokens)} tokens{ssd}, {one.eviction},"
        f" chunk {one.chunk_tokens}"
    )


def _attained(found: Assessment, wanted: float) -> str:
    if found.gave_up:
        return f"less than {wanted:.1%}: misses"
    meets = "meets" if found.meets(wanted) else "misses"
    return f"{found.share:.1%}, P90 TTFT {found.ttft_p90_s:.3g} s: {meets}"


def _mixes(mixes: Sequence[MixFound]) -> list[str]:
    """Returns a line for each mix of hardware, with its cheapest cluster that keeps the SLOs, if
    any. A mix without a simulation shows its cheapest cluster by the cost model."""
    left = [mix for mix in mixes if mix.cheapest is None and not mix.num_simulated]
    dearer = left[UNTRIED_MIXES:]
    if dearer:
        shown = [mix for mix in mixes if mix not in dearer]
        usd = dearer[0].start_usd_per_h
        return [
            *_mixes(shown),
            f"and {len(dearer)} more from {usd:.2f} USD/h on by the cost model; not simulated",
        ]
    names = [f"{mix.start.layout}, {mix.start.hardware}" for mix in mixes]
    roles = [_roles(mix) for mix in mixes]
    wide, high = (max(map(len, texts), default=0) for texts in (names, roles))
    return [
        f"{name:<{wide}}  {role:<{high}} {_price(mix)}"
        for name, role, mix in zip(names, roles, mixes, strict=True)
    ]


def _roles(mix: MixFound) -> str:
    if mix.cheapest is not None:
        return mix.cheapest.candidate.roles
    return "-" if mix.num_simulated else mix.start.roles


def _price(mix: MixFound) -> str:
    if mix.cheapest is not None:
        return f"{mix.cheapest.usd_per_h:>9.2f} USD/h keeps the SLOs"
    if mix.num_simulated:
        return f"  none of {mix.num_simulated} simulated keeps the SLOs"
    return f"{mix.start_usd_per_h:>9.2f} USD/h by the cost model; not simulated"


def figures_of(
    plan: ClusterPlan,
    fewer: Sequence[InstanceLossEffect],
    found: PlanAnswer,
    prepared: Prepared,
    goal: PlanGoal,
    priced: Priced,
) -> dict[str, Any]:
    """Returns the figures of `--json`, which follow from the inputs alone."""
    choice = plan.choice
    names = {
        name
        for start in prepared.starts
        for kind in (start.kind, start.decode_kind)
        for name in (kind.device, kind.attention_device)
        if name
    }
    devices = {name: priced.prices.devices[name] for name in sorted(names)}
    return {
        **found.figures(),
        "choice": None if choice is None else _assessment(choice, goal.wanted),
        "sure": None if plan.sure is None else _assessment(plan.sure, goal.wanted),
        "binds": "" if choice is None else binding(choice, fewer),
        "config": None if choice is None else _tables(choice.candidate, prepared),
        "one_fewer": [
            {
                "change": broken.change,
                "share": rounded(broken.outcome.share),
                "cause": broken.cause,
                "moment": msgspec.to_builtins(broken.moment),
            }
            for broken in fewer
        ],
        "neighbours": [
            {"change": one.change} | _assessment(one.assessment, goal.wanted)
            for one in plan.neighbours
        ],
        "rooms": [
            {
                "cluster": one.candidate.counts,
                "kept": one.kept,
                "missed": one.missed,
                "lacked": one.lacked,
            }
            for one in plan.rooms
        ],
        "front": [_assessment(one, goal.wanted) for one in plan.front()],
        "assessed": len(plan.assessed),
        "shares_prefixes": prepared.shares_prefixes,
        "mixes": msgspec.to_builtins([_bare(mix) for mix in plan.mixes]),
        "left_out": list(prepared.left_out),
        "prices": {
            "devices": msgspec.to_builtins(devices),
            "dram": msgspec.to_builtins(priced.prices.dram),
            "ssd": msgspec.to_builtins(priced.prices.ssd),
        },
        "costs": costs_of(choice, prepared, priced),
        "goal": msgspec.to_builtins(goal) | {"time_limit_s": _finite(goal.time_limit_s)},
        "slo": msgspec.to_builtins(prepared.base.slo.usual),
        "slo_classes": msgspec.to_builtins(prepared.base.slo.classes),
        "runs": rounded(plan.runs),
        "complete": plan.complete,
        "stopped": plan.stopped,
        "num_left": plan.num_left,
    }


def _tables(candidate: Candidate, prepared: Prepared) -> dict[str, Any]:
    """Returns the tables that `simulate --config` needs to run the choice."""
    config: dict[str, Any] = msgspec.to_builtins(candidate.config(prepared.base))
    names = ("cluster", "hardware", "pool", "engine", "conductor", "slo")
    return {name: config[name] for name in names}


def _assessment(found: Assessment, wanted: float) -> dict[str, Any]:
    outcome = found.outcomes[0]
    interval = None
    if found.interval is not None:
        interval = {k: rounded(v) for k, v in msgspec.to_builtins(found.interval).items()}
    return {
        "cluster": found.candidate.counts,
        "hardware": found.candidate.hardware,
        "candidate": msgspec.to_builtins(found.candidate),
        "usd_per_h": rounded(found.usd_per_h),
        "share": rounded(found.share),
        "at_most": found.gave_up,
        "meets": found.meets(wanted),
        "another_sample": interval,
        "draws": [rounded(one.share) for one in found.outcomes[1:]],
        "misses": found.misses(),
        "worst": msgspec.to_builtins(worst_moment(outcome)),
        "ttft_p90_s": found.ttft_p90_s,
        "hit_ratio": outcome.hit_ratio,
        "utilisation": outcome.utilisation,
        "classes": {
            one.name: rounded(one.num_effective / max(one.num_requests, 1))
            for one in outcome.classes
            if one.name or len(outcome.classes) > 1
        },
    }


def _bare(mix: MixFound) -> dict[str, Any]:
    cheapest = mix.cheapest
    return {
        "hardware": mix.start.hardware,
        "layout": mix.start.layout,
        "start": mix.start.counts,
        "start_usd_per_h": rounded(mix.start_usd_per_h),
        "cheapest": cheapest.candidate.counts if cheapest else None,
        "cheapest_usd_per_h": rounded(cheapest.usd_per_h) if cheapest else None,
        "simulated": mix.num_simulated,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
