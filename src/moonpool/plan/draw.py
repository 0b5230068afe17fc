"""Draws a plan: attainment and TTFT over price, with the choice and the front.

The format follows from the file's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moonpool.config import SloConfig
from moonpool.plan.assess import Assessment
from moonpool.plan.confidence import Verdict
from moonpool.plan.search import ClusterPlan

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {Verdict.MEETS: "#2c9a4b", Verdict.UNCLEAR: "#c7a000", Verdict.MISSES: "#d9541e"}
_GREY = "#555555"


def draw_plan(plan: ClusterPlan, wanted: float, slo: SloConfig, path: Path) -> None:
    """Writes the picture. Raises OSError."""
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shown = [one for one in plan.assessed if not one.gave_up]
    _attainment(left, plan, shown, wanted)
    _ttft(right, plan, shown, slo)
    with rc_context({"svg.hashsalt": "moonpool"}):  # byte for byte reproducible
        stamp = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[path.suffix.lower()]
        figure.savefig(path, dpi=120, metadata={stamp: None})


def _attainment(axes: Axes, plan: ClusterPlan, shown: Sequence[Assessment], wanted: float) -> None:
    axes.set(title="Attainment", xlabel="USD per hour", ylabel="requests within both SLOs")
    for verdict, colour in _COLOURS.items():
        ones = [one for one in shown if one.verdict is verdict]
        if not ones:
            continue
        means = [one.interval.mean for one in ones]
        below = [one.interval.mean - one.interval.low for one in ones]
        above = [one.interval.high - one.interval.mean for one in ones]
        axes.errorbar(
            [one.usd_per_h for one in ones],
            means,
            yerr=[below, above],
            fmt="o",
            color=colour,
            label=verdict.value,
            markersize=4,
            linewidth=1,
        )
    front = [one for one in plan.front() if not one.gave_up]
    axes.plot(
        [one.usd_per_h for one in front],
        [one.interval.mean for one in front],
        color=_GREY,
        linewidth=1,
        label="front",
    )
    axes.axhline(wanted, color=_GREY, linestyle="--", linewidth=1, label=f"wanted, {wanted:.0%}")
    _mark_choice(axes, plan, [0.0] if plan.choice is None else [plan.choice.interval.mean])
    axes.legend(frameon=False, fontsize=8)


def _ttft(axes: Axes, plan: ClusterPlan, shown: Sequence[Assessment], slo: SloConfig) -> None:
    axes.set(title="Time to first token", xlabel="USD per hour", ylabel="90th percentile (s)")
    for verdict, colour in _COLOURS.items():
        ones = [one for one in shown if one.verdict is verdict]
        axes.plot(
            [one.usd_per_h for one in ones],
            [one.ttft_p90_s for one in ones],
            "o",
            color=colour,
            markersize=4,
        )
    axes.axhline(slo.ttft_s, color=_GREY, linestyle="--", linewidth=1)
    _mark_choice(axes, plan, [0.0] if plan.choice is None else [plan.choice.ttft_p90_s])


def _mark_choice(axes: Axes, plan: ClusterPlan, at: Sequence[float]) -> None:
    if plan.choice is None:
        return
    one = plan.choice.candidate
    axes.plot([plan.choice.usd_per_h], at, "*", color="#1f77b4", markersize=15, zorder=5)
    axes.annotate(
        f"{one.counts}, {one.hardware}",
        (plan.choice.usd_per_h, at[0]),
        textcoords="offset points",
        xytext=(8, -14),
        fontsize=8,
    )
