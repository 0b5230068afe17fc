"""Prints a plan as tables, and makes its figures for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from moonpool.plan.advice import InstanceLossEffect, binding, main_cause, worst_moment
from moonpool.plan.assess import Assessment, NeighbourFound, PlanCheck, PlanGoal
from moonpool.plan.candidate import Candidate, Priced, tokens
from moonpool.plan.demand import Prepared
from moonpool.plan.offloading import Balance, DecodeNode
from moonpool.plan.search import ClusterPlan
from moonpool.sim.metrics import rounded

FRONT_ROWS = 12


def print_plan(plan: ClusterPlan, words: str, wanted: float) -> None:
    """Prints the advice, the neighbours, the front and the mixes of hardware."""
    click.echo(words)
    choice = plan.choice
    if choice is not None:
        one = choice.candidate
        click.echo(
            f"\nchunks of {one.chunk_tokens} tokens; placement {one.placement}, admission"
            f" {one.admission}, eviction {one.eviction}; {tokens(one.cache_tokens)} tokens of DRAM"
            " an instance"
        )
        click.echo("\nnext to it")
        _print_neighbours(plan.neighbours, choice)
    click.echo(f"\nnothing cheaper attains as much (wanted: {wanted:.0%})")
    front = plan.front()
    for found in front[-FRONT_ROWS:]:
        click.echo(f"  {_row(found)}")
    click.echo("\nhardware")
    for mix in plan.mixes:
        click.echo(f"  {_mix(mix, plan.complete)}")
    if not plan.complete:
        click.echo("\nnot complete: all allowed simulations were run; allow more with --runs")


def print_offloading(words: str, nodes: Sequence[DecodeNode], prepared: Prepared) -> dict[str, Any]:
    """Prints the result and returns its figures."""
    slo, context = prepared.base.slo, prepared.context_tokens
    click.echo(
        f"\n{words}\n\none decode node, by the cost model: contexts of {context:,} tokens, TBT"
        f" within {slo.tbt_s:g} s"
    )
    for node in nodes:
        bound = "memory" if node.full else "time"
        click.echo(
            f"  {node.kind!s:<28} {node.usd_per_h:>8.2f} USD/h  {tokens(node.kv_tokens):>6} of"
            f" KVCache  batch {node.batch:>4} (bound by {bound}), {1e3 * node.step_s:.1f} ms,"
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
    click.echo("\nchecked with fresh seeds")
    click.echo(f"  {_row(check.choice)}")
    _print_neighbours(check.neighbours, check.choice)
    click.echo(check.conclusion())
    return {
        "holds": check.holds,
        "conclusion": check.conclusion(),
        "choice": _assessment(check.choice),
        "neighbours": _neighbours(check.neighbours),
    }


def _print_neighbours(around: Sequence[NeighbourFound], choice: Assessment) -> None:
    for neighbour in around:
        found = neighbour.assessment
        more = found.usd_per_h - choice.usd_per_h
        price = "same price" if not more else f"{more:+.2f} USD/h"
        cause = main_cause(found.misses())
        lacks = f"; lacks {cause}" if cause and found.verdict.value != "meets" else ""
        click.echo(f"  {neighbour.change:<32} {price:>14}  {_attained(found)}{lacks}")


def _row(found: Assessment) -> str:
    return f"{_what(found.candidate):<58} {found.usd_per_h:>9.2f} USD/h  {_attained(found)}"


def _what(one: Candidate) -> str:
    return f"{one.counts} {one.hardware}, {tokens(one.cache_tokens)}, chunk {one.chunk_tokens}"


def _attained(found: Assessment) -> str:
    low, mean, high = found.interval.low, found.interval.mean, found.interval.high
    if found.gave_up:
        return f"less than {mean:.1%}: misses"
    ttft = f"P90 TTFT {found.ttft_p90_s:.3g} s"
    return f"{mean:.1%} ({low:.1%} to {high:.1%}), {ttft}: {found.verdict.value}"


def _mix(mix: Any, complete: bool) -> str:
    kind = "colocated" if mix.start.mixed else "P/D"
    name = f"{kind} {mix.start.hardware}"
    if mix.settled is not None:
        one = mix.settled.candidate
        return f"{name:<40} {one.counts:>8} {mix.settled.usd_per_h:>9.2f} USD/h, whole trace"
    if mix.boundary is not None:
        return f"{name:<40} {mix.boundary.counts:>8}  at the busiest part; dearer"
    start = f"{mix.start.counts:>8} {mix.start_usd_per_h:>9.2f} USD/h"
    why = "too dear to look at" if complete else "not looked at"
    return f"{name:<40} {start} by the cost model; {why}"


def figures_of(
    plan: ClusterPlan,
    fewer: Sequence[InstanceLossEffect],
    words: str,
    prepared: Prepared,
    goal: PlanGoal,
    priced: Priced,
) -> dict[str, Any]:
    """Returns the figures of `--json`. They follow from the inputs alone."""
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
        "advice": words,
        "choice": None if choice is None else _assessment(choice),
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
        "neighbours": _neighbours(plan.neighbours),
        "front": [_assessment(one) for one in plan.front()],
        "assessed": [_assessment(one) for one in plan.assessed],
        "mixes": msgspec.to_builtins([_bare(mix) for mix in plan.mixes]),
        "left_out": list(prepared.left_out),
        "prices": {
            "devices": msgspec.to_builtins(devices),
            "dram": msgspec.to_builtins(priced.prices.dram),
        },
        "goal": msgspec.to_builtins(goal),
        "slo": msgspec.to_builtins(prepared.base.slo),
        "runs": rounded(plan.runs),
        "complete": plan.complete,
    }


def _tables(candidate: Candidate, prepared: Prepared) -> dict[str, Any]:
    """Returns the tables that `simulate --config` needs to run the choice."""
    config: dict[str, Any] = msgspec.to_builtins(candidate.config(prepared.base))
    names = ("cluster", "hardware", "pool", "engine", "conductor", "slo")
    return {name: config[name] for name in names}


def _neighbours(around: Sequence[NeighbourFound]) -> list[dict[str, Any]]:
    return [{"change": one.change} | _assessment(one.assessment) for one in around]


def _assessment(found: Assessment) -> dict[str, Any]:
    moment = worst_moment(found.outcomes[0])
    return {
        "cluster": found.candidate.counts,
        "hardware": found.candidate.hardware,
        "candidate": msgspec.to_builtins(found.candidate),
        "usd_per_h": rounded(found.usd_per_h),
        "attainment": {
            name: rounded(value) for name, value in msgspec.to_builtins(found.interval).items()
        },
        "at_most": found.gave_up,
        "verdict": found.verdict.value,
        "seeds": len(found.outcomes),
        "misses": found.misses(),
        "worst": msgspec.to_builtins(moment),
        "ttft_p90_s": found.ttft_p90_s,
        "hit_ratio": found.outcomes[0].hit_ratio,
        "utilisation": found.outcomes[0].utilisation,
    }


def _bare(mix: Any) -> dict[str, Any]:
    return {
        "hardware": mix.start.hardware,
        "colocated": bool(mix.start.mixed),
        "start": mix.start.counts,
        "start_usd_per_h": rounded(mix.start_usd_per_h),
        "boundary": mix.boundary.counts if mix.boundary else None,
        "settled": mix.settled.candidate.counts if mix.settled else None,
        "settled_usd_per_h": rounded(mix.settled.usd_per_h) if mix.settled else None,
    }
