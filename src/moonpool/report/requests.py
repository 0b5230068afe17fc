"""Requests over time, and why some were refused."""

from __future__ import annotations

from typing import Any

from moonpool.report.axis import count_axis
from moonpool.report.figure import Figure, note
from moonpool.report.series import rates, window_edges
from moonpool.report.span import Series, over_time
from moonpool.report.svg import bars
from moonpool.report.words import counted, duration, percent, significant
from moonpool.sim.simulation import Simulation

MAX_WINDOWS = 120
REASONS = {
    "ttft_slo": "the first token would have come too late",
    "decode_load": "decode was too loaded when it arrived",
    "decode_load_predicted": "decode would have been too loaded after its prefill",
    "tbt_slo_late": "after its prefill, the decode instance saw answers become too slow",
    "no_blocks": "the instance it was sent to had no free blocks",
    "no_prefill_capacity": "no prefill instance had room",
    "no_decode_capacity": "no decode instance had room for the answer",
    "instance_lost": "its instance was lost, too often",
    "no_instance": "no instance was up",
    "no_prefill_instance": "no prefill instance was up",
    "no_decode_instance": "no decode instance was up",
}


def requests_figure(simulation: Simulation) -> Figure:
    timeline = simulation.timeline
    title = "Requests over time"
    edges = window_edges(timeline.series("arrived"), MAX_WINDOWS)
    window_s = edges[1] - edges[0]
    how = (
        f"Requests per second, in windows of {duration(window_s)}. Where the answered fall behind "
        "the arriving, work piles up or is refused; where those within both SLOs fall behind the "
        "answered, users wait longer than promised."
    )
    parts = [
        Series("arrived", rates(timeline.series("arrived"), edges), "c5", filled=True),
        Series("answered", rates(timeline.series("completed"), edges), "c1"),
        Series("answered within both SLOs", rates(timeline.series("effective"), edges), "c3"),
    ]
    if simulation.collector.rejected:
        parts.append(Series("refused", rates(timeline.series("rejected"), edges), "c4"))
    return over_time(
        title,
        how,
        parts,
        lambda high: count_axis(high, "requests per second"),
        lambda value: f"{significant(value)} per s",
        wide=True,
    )


def refusals_figure(figures: dict[str, Any]) -> Figure:
    title = "Why requests were refused"
    reasons: dict[str, int] = figures["rejected_by_reason"]
    total = figures["rejected"]
    if not total:
        return Figure(title, "Refusals by reason.", note("None was refused."))
    wasted_s = figures["wasted_prefill_s"]
    were = "was" if total == 1 else "were"
    how = f"{counted(total, 'request')} {were} turned away; {_waste(figures, wasted_s)}"
    known = [f"{name}: {REASONS[name]}." for name in reasons if name in REASONS]
    rows = [
        (name, float(number), f"{number:,} ({percent(number / total)})", "c4")
        for name, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Figure(title, " ".join([how, *known]), bars(rows, title, 160))


def _waste(figures: dict[str, Any], wasted_s: float) -> str:
    if not wasted_s:
        return "no prefill was spent on them."
    number = figures["wasted_prefills"]
    return (
        f"{counted(number, 'prefill')} took {duration(wasted_s)} of compute for requests that were "
        "never answered."
    )
