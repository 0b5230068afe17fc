"""Draws a plan: attainment and TTFT over price, with the choice and the front.

The format follows from the file's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from moonpool.pages.units import given_percent
from moonpool.plan.assess import Assessment
from moonpool.plan.search import ClusterPlan
from moonpool.types import Slo
from moonpool_lab.plots.style import BLUE, GREEN, RED, SOFT, drawing

_COLOURS = {True: GREEN, False: RED}


def draw_plan(plan: ClusterPlan, wanted: float, slo: Slo, path: Path) -> None:
    """Writes the picture. Raises OSError."""
    shown = [one for one in plan.assessed if not one.gave_up]
    with drawing(path, 12.0, 4.8) as figure:
        left, right = figure.subplots(1, 2)
        _attainment(left, plan, shown, wanted)
        _ttft(right, plan, shown, slo, wanted)


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
        color=SOFT,
        linewidth=1,
        label="front",
    )
    axes.axhline(
        wanted, color=SOFT, linestyle="--", linewidth=1, label=f"wanted, {given_percent(wanted)}"
    )
    choice = plan.choice
    if choice is not None and choice.interval is not None:
        low, high = choice.interval.low, choice.interval.high
        axes.vlines(choice.usd_per_h, low, high, color=BLUE, label="other samples")
    _mark_choice(axes, plan, [0.0] if choice is None else [choice.share])
    axes.legend()


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
    axes.axhline(slo.ttft_s, color=SOFT, linestyle="--", linewidth=1)
    _mark_choice(axes, plan, [0.0] if plan.choice is None else [plan.choice.ttft_p90_s])


def _mark_choice(axes: Axes, plan: ClusterPlan, at: Sequence[float]) -> None:
    if plan.choice is None:
        return
    one = plan.choice.candidate
    axes.plot([plan.choice.usd_per_h], at, "*", color=BLUE, markersize=15, zorder=5)
    axes.annotate(
        f"{one.roles}, {one.hardware}",
        (plan.choice.usd_per_h, at[0]),
        textcoords="offset points",
        xytext=(8, -14),
        fontsize=8,
    )
