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

from moonpool.plan.assess import Assessment
from moonpool.plan.search import ClusterPlan
from moonpool.types import Slo

_COLOURS = {True: "#2c9a4b", False: "#d9541e"}
_GREY = "#555555"


def draw_plan(plan: ClusterPlan, wanted: float, slo: Slo, path: Path) -> None:
    """Writes the picture. Raises OSError."""
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shown = [one for one in plan.assessed if not one.gave_up]
    _attainment(left, plan, shown, wanted)
    _ttft(right, plan, shown, slo, wanted)
    with rc_context({"svg.hashsalt": "moonpool"}):  # byte for byte reproducible
        stamp = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[path.suffix.lower()]
        figure.savefig(path, dpi=120, metadata={stamp: None})


def _attainment(axes: Axes, plan: ClusterPlan, shown: Sequence[Assessment], wanted: float) -> None:
    axes.set(title="Attainment", xlabel="USD per hour", ylabel="requests within both SLOs")
    for meets, colour in _COLOURS.items():
        ones = [one for one in shown if one.meets(wanted) is meets]
        axes.plot(
            [one.usd_per_h for one in ones],
            [one.share for one in ones],
            "o",
            color=colour,
            label="meets" if meets else "misses",
            markersize=4,
        )
    front = plan.front()
    axes.plot(
        [one.usd_per_h for one in front],
        [one.share for one in front],
        color=_GREY,
        linewidth=1,
        label="front",
    )
    axes.axhline(wanted, color=_GREY, linestyle="--", linewidth=1, label=f"wanted, {wanted:.0%}")
    choice = plan.choice
    if choice is not None and choice.interval is not None:
        low, high = choice.interval.low, choice.interval.high
        axes.vlines(choice.usd_per_h, low, high, color="#1f77b4", label="other samples")
    _mark_choice(axes, plan, [0.0] if choice is None else [choice.share])
    axes.legend(frameon=False, fontsize=8)


def _ttft(
    axes: Axes, plan: ClusterPlan, shown: Sequence[Assessment], slo: Slo, wanted: float
) -> None:
    axes.set(title="Time to first token", xlabel="USD per hour", ylabel="90th percentile (s)")
    for meets, colour in _COLOURS.items():
        ones = [one for one in shown if one.meets(wanted) is meets]
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
        f"{one.roles}, {one.hardware}",
        (plan.choice.usd_per_h, at[0]),
        textcoords="offset points",
        xytext=(8, -14),
        fontsize=8,
    )
