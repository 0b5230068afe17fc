"""Writes a plan as one page of HTML: the answer, sliders over its stored runs, prices and doubts.

The page loads nothing from elsewhere. The page contains its only script, and its content policy
allows no other script.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from math import fsum
from typing import Any

import msgspec
from markupsafe import Markup

from moonpool.distributions import rounded
from moonpool.pages.chart import HALF, Axis, Plot, count_axis, share_axis
from moonpool.pages.units import byte_size, duration, percent
from moonpool.plan.answer import CAUSES
from moonpool.plan.candidate import Candidate, Priced, tokens
from moonpool.plan.demand import Prepared
from moonpool.plan.latency_table import MULTIPLES
from moonpool.plan.search import ClusterPlan
from moonpool.plan.stored_runs import StoredRun
from moonpool.plan.trial import main_cause
from moonpool.sim.report.page import environment
from moonpool.sim.report.plots import ReportFigure, Table

COLOURS = ("c1", "c2", "c3", "c4", "c5")
SHOWN_NOT = ("wall_s", "plan_s", "cpu_s", "front", "neighbours")


def render_plan(
    plan: ClusterPlan,
    stored: Sequence[StoredRun],
    figures: dict[str, Any],
    prepared: Prepared,
    priced: Priced,
    command: str,
) -> str:
    """Returns the page. `figures` has the figures of `--json`, including `run`."""
    script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(_data(stored, figures, prepared, priced)).replace("<", "\\u003c")
    kept = {name: value for name, value in figures.items() if name not in SHOWN_NOT}
    notes = figures["costs"].get("notes", ())
    return (
        environment(__package__)
        .get_template("page.html.jinja")
        .render(
            trace_name=figures["run"]["trace"],
            ended=_ended(plan),
            parts=[(part["label"] or "Answer", part["text"]) for part in figures["answer"]],
            charts=[
                attainment_by_price(plan, figures["goal"]["wanted"]),
                *_by_load(plan, stored, figures, prepared),
            ],
            notes=[f"{note[0].upper()}{note[1:]}." if note[-1] != "." else note for note in notes],
            table=_table(figures),
            command=command,
            figures=json.dumps(kept, indent=1, ensure_ascii=False),
            data=Markup(data),  # noqa: S704 - JSON without any tag
            script=Markup(script),  # noqa: S704 - the package's own
            script_hash=Markup(digest),  # noqa: S704 - base64
        )
    )


def _data(
    stored: Sequence[StoredRun], figures: dict[str, Any], prepared: Prepared, priced: Priced
) -> dict[str, Any]:
    """Returns the data that the script reads: the clusters with their runs."""
    demand = prepared.demand
    number = len(demand.arrived_s)
    runs: dict[Candidate, list[StoredRun]] = {}
    for run in stored:
        runs.setdefault(run.candidate, []).append(run)
    choice = figures["choice"]
    return {
        "rate": rounded(number / max(demand.duration_s, 1e-9)),
        "tokens_per_request": (fsum(demand.input_tokens) + fsum(demand.output_tokens)) / number,
        "multiples": MULTIPLES,
        "slo": {"ttft_s": figures["slo"]["ttft_s"], "tbt_s": figures["slo"]["tbt_s"]},
        "slo_classes": figures["slo_classes"],
        "wanted": figures["goal"]["wanted"],
        "clusters": [
            {
                "machine": priced.words(one),
                "memory": _memory(one, priced),
                "usd_per_h": rounded(priced.usd_per_h(one)),
                "chosen": choice is not None and msgspec.to_builtins(one) == choice["candidate"],
                "runs": [_run(run) for run in own],
            }
            for one, own in sorted(runs.items(), key=lambda pair: pair[0].cache_tokens)
        ],
    }


def _run(run: StoredRun) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "load": run.speed,
        "ttft_p90_s": outcome.ttft_p90_s,
        "lacked": CAUSES.get(main_cause(outcome.misses), ""),
        "classes": [
            {"name": one.name, "requests": one.num_requests, "times": one.times}
            for one in outcome.classes
        ],
    }


def _memory(one: Candidate, priced: Priced) -> str:
    number = one.num_instances
    text = f"DRAM for {tokens(one.cache_tokens * number)} tokens"
    text += f" ({byte_size(priced.pool_bytes(one, one.cache_tokens))})"
    if one.ssd_tokens:
        text += f", SSD for {tokens(one.ssd_tokens * number)}"
    return text


def attainment_by_price(plan: ClusterPlan, wanted: float) -> ReportFigure:
    """Returns the chart of the simulated clusters, by price."""
    title = "Price and attainment"
    how = (
        "Each dot is a cluster, simulated on the trace as it is; green ones keep the SLOs for the"
        " wanted share. The line is the best for its price. Runs that ended early are left out."
    )
    shown = [one for one in plan.assessed if not one.gave_up]
    if not shown:
        return ReportFigure(title, how, note="No run went to its end.")
    prices = count_axis(max(one.usd_per_h for one in shown), "USD per hour")
    plot = Plot(prices, share_axis(""), HALF)
    plot.limit_y(wanted, f"wanted, {percent(wanted)}")
    plot.line([(one.usd_per_h, one.share) for one in plan.front()], "c5")
    for one in shown:
        plot.mark(one.usd_per_h, one.share, "", "c3" if one.meets(wanted) else "c4")
    if plan.choice is not None:
        plot.mark(plan.choice.usd_per_h, plan.choice.share, "the choice", "c1")
    key = (("c3", "keeps the SLOs"), ("c4", "misses"), ("c1", "the choice"))
    return ReportFigure(title, how, plot.svg(title), key=key)


def _by_load(
    plan: ClusterPlan, stored: Sequence[StoredRun], figures: dict[str, Any], prepared: Prepared
) -> list[ReportFigure]:
    """Returns the chart of the choice at several loads, with a line for each size of DRAM, or no
    chart without stored runs."""
    if plan.choice is None or not stored:
        return []
    chosen = plan.choice.candidate
    change = msgspec.structs.replace
    lines: dict[int, list[tuple[float, float]]] = {}
    for run in stored:
        one = run.candidate
        if change(one, cache_tokens=chosen.cache_tokens) == chosen:
            lines.setdefault(one.cache_tokens, []).append((run.speed, run.outcome.share))
    fastest = max(run.speed for run in stored)
    ticks = tuple((n / 2, f"{n / 2:g}") for n in range(int(2 * fastest) + 1))
    plot = Plot(
        Axis(0.0, fastest, ticks, "load, in multiples of the trace's"), share_axis(""), HALF
    )
    wanted = figures["goal"]["wanted"]
    plot.limit_y(wanted, f"wanted, {percent(wanted)}")
    key = []
    for css, (cache, points) in zip(COLOURS, sorted(lines.items()), strict=False):
        plot.line(sorted(points), css)
        key.append((css, f"{tokens(cache)} tokens of DRAM an instance"))
    slo = prepared.base.slo.usual
    title = "The choice at other loads"
    how = (
        f"Share of requests within TTFT {duration(slo.ttft_s)} and TBT {duration(slo.tbt_s)}"
        " as the trace arrives faster or slower."
    )
    if prepared.base.slo.classes:
        how = "Share of requests within their SLOs, in the class with the lowest."
    return [ReportFigure(title, how, plot.svg(title), key=tuple(key))]


def _ended(plan: ClusterPlan) -> str:
    """Returns why the search ended early, or "" if it did not. If no cluster was found, the answer
    contains the reason, so this is "" then, too."""
    if not plan.stopped or plan.choice is None:
        return ""
    return f"The search ended early: {plan.stopped}."


def _table(figures: dict[str, Any]) -> Table:
    wanted = figures["goal"]["wanted"]
    rows = [_row("best at its price", one, wanted) for one in figures["front"]]
    rows += [_row(one["change"], one, wanted) for one in figures["neighbours"]]
    head = ("cluster", "hardware", "tokens of DRAM", "USD/h", "within SLOs", "TTFT, p90")
    return Table(("", *head), rows)


def _row(what: str, one: dict[str, Any], wanted: float) -> tuple[str, ...]:
    candidate = one["candidate"]
    roles = " + ".join(
        f"{candidate[role]} {role}" for role in ("prefill", "decode", "mixed") if candidate[role]
    )
    share = f"less than {percent(wanted)}" if one["at_most"] else percent(one["share"])
    late = "-" if one["at_most"] else duration(one["ttft_p90_s"])
    size = tokens(candidate["cache_tokens"])
    return (what, roles, one["hardware"], size, f"{one['usd_per_h']:,.2f}", share, late)
