"""Makes the section "What users felt": latencies, requests over time, stages and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moonpool.config.tables import Config
from moonpool.pages.chart import bars, count_axis
from moonpool.pages.units import counted, duration, percent, significant
from moonpool.request_record import STAGES
from moonpool.sim.report.plots import (
    NO_REQUEST,
    ReportFigure,
    Series,
    Table,
    distribution,
    over_time,
    rates,
    window_edges,
)
from moonpool.sim.simulation import Simulation

MAX_WINDOWS = 120
REASONS = {
    "ttft_slo": "the predicted TTFT exceeded the SLO",
    "ttft_slo_late": "no decode batch had room within the TTFT SLO",
    "goodput_prefill": "other requests needed less prefill time",
    "goodput_decode": "other requests needed less decode time",
    "batch_full": "no batch had room within the TTFT SLO",
    "decode_load": "the decode load exceeded its limit when the request arrived",
    "decode_load_predicted": "the decode load would have exceeded its limit after the prefill",
    "tbt_slo_late": "after the prefill, the answer no longer fitted within the TBT SLO",
    "long_queue": "the prompts before the request would have taken too long",
    "fair_share": "waiting requests of other tenants came first",
    "programs_wait": "programs that began earlier came first",
    "admission_policy": "the admission policy refused the request",
    "no_blocks": "the instance had no free blocks",
    "no_prefill_capacity": "no prefill instance had room",
    "no_decode_capacity": "no decode instance had room for the answer",
    "instance_lost": "the request lost its instances too often",
    "no_instance": "no instance was up",
    "no_prefill_instance": "no prefill instance was up",
    "no_decode_instance": "no decode instance was up",
}


def user_figures(simulation: Simulation, figures: dict[str, Any]) -> list[ReportFigure]:
    """Returns the charts and tables of the section. `figures` is the result of `summarise`."""
    return [
        _ttft(simulation),
        _tbt(simulation),
        *_slo_classes(simulation.config, figures),
        _requests(simulation),
        _stages(figures),
        _refusals(figures),
    ]


def _ttft(simulation: Simulation) -> ReportFigure:
    return distribution(
        "Time to first token (TTFT)",
        "How long users waited for an answer to begin: the curve gives the share of answered "
        "requests that waited at most that long. Left of the dashed line, the SLO was met.",
        [("c1", "answered requests", simulation.collector.ttft_s)],
        simulation.config.slo.usual.ttft_s,
    )


def _tbt(simulation: Simulation) -> ReportFigure:
    found = simulation.collector
    return distribution(
        "Time between tokens (TBT)",
        "How evenly answers flowed. The SLO limits the slow tenth of each answer: the mean of the "
        "longest tenth of its pauses. The grey curve shows every single pause for comparison.",
        [
            ("c1", "slow tenth of each answer", found.tbt_top10_mean_s),
            ("c5", "every pause between two tokens", found.gap_s),
        ],
        simulation.config.slo.usual.tbt_s,
    )


def _slo_classes(config: Config, figures: dict[str, Any]) -> list[ReportFigure]:
    """Returns a table with a row for each class that requests named, or nothing without classes."""
    found: dict[str, Any] = figures.get("slo_classes", {})
    levels = {one.name: one for one in config.slo.classes}
    rows = [
        (
            name,
            f"{one['requests']:,}",
            percent(one["effective"] / max(one["requests"], 1)),
            f"{duration(levels[name].ttft_s)}, {duration(levels[name].tbt_s)}",
            duration(one["ttft_s"]["p90"]),
        )
        for name, one in found.items()
    ]
    head = ("class", "requests", "within its SLOs", "SLO of TTFT, TBT", "TTFT, p90")
    how = "Requests by their class of service levels. Requests without a class are not shown here."
    return [ReportFigure("Classes of requests", how, table=Table(head, rows))] if rows else []


def _requests(simulation: Simulation) -> ReportFigure:
    timeline = simulation.timeline
    edges = window_edges(timeline.series("arrived"), MAX_WINDOWS)

    def rate_of(name: str) -> list[tuple[float, float]]:
        return rates(timeline.series(name), edges)

    series = [
        Series("arrived", rate_of("arrived"), "c5", filled=True),
        Series("answered", rate_of("completed"), "c1"),
        Series("answered within both SLOs", rate_of("effective"), "c3"),
    ]
    if simulation.collector.rejected:
        series.append(Series("refused", rate_of("rejected"), "c4"))
    return over_time(
        "Requests over time",
        f"Requests per second, in windows of {duration(edges[1] - edges[0])}. Where answered "
        "requests fall behind arrived ones, work piles up or is refused. Where requests within "
        "both SLOs fall behind answered ones, users wait longer than promised.",
        series,
        lambda high: count_axis(high, "requests per second"),
        lambda value: f"{significant(value)} per s",
        wide=True,
    )


def _stages(figures: dict[str, Any]) -> ReportFigure:
    title = "Where the time of a request went"
    how = (
        "Mean time of an answered request in each stage, one after the other. All stages but "
        "decode make up the TTFT."
    )
    stages: dict[str, float] = figures["stages_s"]
    if not stages:
        return ReportFigure(title, how, note=NO_REQUEST)
    total_s = sum(stages.values()) or 1.0
    rows = []
    for name, _, _ in STAGES:
        seconds = stages.get(name, 0.0)
        caption = f"{duration(seconds)} ({percent(seconds / total_s)})"
        css = "c2" if name == "decode" else "c1"
        rows.append((name.replace("_", " "), seconds, caption, css))
    return ReportFigure(title, how, bars(rows, title, 120))


def _refusals(figures: dict[str, Any]) -> ReportFigure:
    title = "Why requests were refused"
    reasons: dict[str, int] = figures["rejected_by_reason"]
    total = figures["rejected"]
    if not total:
        return ReportFigure(title, "Refusals by reason.", note="No request was refused.")
    waste = "no prefill was spent on them."
    if figures["wasted_prefill_s"]:
        waste = (
            f"{counted(figures['wasted_prefills'], 'prefill')} took "
            f"{duration(figures['wasted_prefill_s'])} of compute for requests that were never "
            "answered."
        )
    were = "was" if total == 1 else "were"
    how = [f"{counted(total, 'request')} {were} refused; {waste}"]
    how += [f"{name}: {REASONS[name]}." for name in reasons if name in REASONS]
    rows = [
        (name, float(number), f"{number:,} ({percent(number / total)})", "c4")
        for name, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ReportFigure(title, " ".join(how), bars(rows, title, 160))


CHARTS: dict[str, Callable[[Simulation], ReportFigure]] = {
    "ttft": _ttft,
    "tbt": _tbt,
    "requests": _requests,
}
"""The charts that a notebook can draw one at a time, by name."""
