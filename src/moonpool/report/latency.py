"""What users felt: distributions of TTFT and TBT, where the time went, and how well it was
foreseen."""

from __future__ import annotations

from typing import Any

from moonpool.metrics import STAGES
from moonpool.report.axis import latency_axis, share_axis
from moonpool.report.figure import Figure, note
from moonpool.report.svg import Plot, bars
from moonpool.report.words import duration, percent, significant
from moonpool.sim.histogram import Histogram
from moonpool.sim.simulation import Simulation

NUM_POINTS = 250
STAGE_WORDS = {
    "placement": "placement",
    "queue_and_fetch": "queue and fetch",
    "prefill": "prefill",
    "handover": "handover",
    "decode": "decode",
}


def ttft_figure(simulation: Simulation) -> Figure:
    slo_s = simulation.config.slo.ttft_s
    return _distribution(
        "Time to first token (TTFT)",
        "How long users waited for an answer to begin. At a height of 90 % the curve stands over "
        "the wait that nine of ten answered requests did not exceed; left of the dashed line the "
        "promise was kept.",
        [("c1", "answered requests", simulation.collector.ttft_s)],
        slo_s,
    )


def tbt_figure(simulation: Simulation) -> Figure:
    found = simulation.collector
    return _distribution(
        "Time between tokens (TBT)",
        "How evenly answers flowed. The promise is held against the slow tenth of each "
        "answer: the mean of the longest tenth of its pauses. For comparison, every single pause.",
        [
            ("c1", "slow tenth of each answer", found.tbt_top10_mean_s),
            ("c5", "every pause between two tokens", found.gap_s),
        ],
        simulation.config.slo.tbt_s,
    )


def stages_figure(figures: dict[str, Any]) -> Figure:
    title = "Where the time of a request went"
    how = (
        "Mean seconds per answered request in each stage, one after the other; all but decode "
        "make up the time to the first token."
    )
    stages: dict[str, float] = figures["stages_s"]
    if not stages:
        return Figure(title, how, note("No request was answered."))
    total_s = sum(stages.values()) or 1.0
    rows = [
        (
            STAGE_WORDS[name],
            stages.get(name, 0.0),
            f"{duration(stages.get(name, 0.0))} ({percent(stages.get(name, 0.0) / total_s)})",
            "c2" if name == "decode" else "c1",
        )
        for name, _, _ in STAGES
    ]
    return Figure(title, how, bars(rows, title, 120))


def compute_figure(simulation: Simulation, figures: dict[str, Any]) -> Figure:
    mean_s = figures["prefill_compute_s"]["mean"]
    return _distribution(
        "Prefill computed per request",
        f"Seconds an instance spent on the prompt, waiting not included: {duration(mean_s)} in the "
        "mean. What the cache saves shows here first.",
        [("c1", "answered requests", simulation.collector.prefill_compute_s)],
        None,
    )


def foresight_figure(simulation: Simulation, figures: dict[str, Any]) -> Figure:
    title = "How well the Conductor foresaw the first token"
    error_s = simulation.collector.ttft_error_s
    if not error_s.count:
        return Figure(title, "Predicted against true TTFT.", note("No request was answered."))
    found = figures["predicted_ttft_error_s"]
    bias_s = found["bias"]
    side = "soon" if bias_s < 0 else "late"
    lean = f"; on balance it promised {duration(abs(bias_s))} too {side}" if bias_s else ""
    seen = figures["predictions"]
    others = (
        f" The time between tokens was off by {duration(seen['tbt_s']['mean_absolute'])}, the"
        f" number of answers decoding by {significant(seen['decoding']['mean_absolute'])}."
    )
    return _distribution(
        title,
        "Placement and admission rest on a predicted TTFT. Shown is how far it was off, early or "
        f"late: {duration(found['mean_absolute'])} in the mean{lean}.{others}",
        [("c1", "answered requests", error_s)],
        None,
    )


def _distribution(
    title: str, how: str, curves: list[tuple[str, str, Histogram]], slo_s: float | None
) -> Figure:
    drawn = [(css, words, values) for css, words, values in curves if values.count]
    if not drawn:
        return Figure(title, how, note("No request was answered."))
    low_s = min(values.quantile(0.002) for _, _, values in drawn)
    high_s = max(values.largest for _, _, values in drawn)
    x = latency_axis(min(low_s, slo_s or low_s), max(high_s, slo_s or high_s))
    plot = Plot(x, share_axis("share at or below"))
    if slo_s is not None:
        kept = percent(drawn[0][2].share_up_to(slo_s))
        plot.limit_x(slo_s, f"SLO {duration(slo_s)}: {kept}")
    for css, _, values in reversed(drawn):
        points = values.curve(NUM_POINTS)
        plot.steps([(points[0][0], 0.0), *points], css)
    css, _, values = drawn[0]
    for share in (0.5, 0.9, 0.99):
        at_s = values.quantile(share)
        plot.mark(at_s, share, f"p{share * 100:g} {duration(at_s)}", css)
    key = tuple((css, words) for css, words, _ in drawn)
    return Figure(title, how, plot.svg(title), key if len(key) > 1 else ())
