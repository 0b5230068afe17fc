"""Draws a finding's panels as one PNG with matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from moonpool_lab.plots.style import SERIES, drawing
from papers.finding import Finding
from papers.plot import Panel, PlotSeries

PANEL_INCHES = (6.0, 4.4)
MAX_COLUMNS = 3
PAPER_COLOURS = ("#9a9a9a", "#c4b6a0", "#6f6f6f", "#d9c9a8", "#b0a0b0", "#808a90")
"""The papers' colours are pale; ours are those of all pages."""
OUR_COLOURS = (*SERIES[:4], "#8c4fb4", "#c7a000")
MAX_LEVEL_NAMES = 4  # longer lists of group names stand slanted


def draw(finding: Finding, folder: Path) -> Path | None:
    """Writes FOLDER/NAME.png; None if there is nothing to draw. Raises OSError."""
    if not finding.panels:
        return None
    columns = 2 if len(finding.panels) == 4 else min(len(finding.panels), MAX_COLUMNS)
    lines = -(-len(finding.panels) // columns)
    width, height = PANEL_INCHES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{finding.name}.png"
    with drawing(path, columns * width, lines * height) as figure:
        figure.suptitle(f"{finding.title}\n{finding.source}", fontsize=11)
        for number, panel in enumerate(finding.panels):
            _draw_panel(figure.add_subplot(lines, columns, number + 1), panel)
    return path


def _draw_panel(axes: Axes, panel: Panel) -> None:
    all_bars = [s for s in panel.series if s.mark == "bars"]
    groups = list(dict.fromkeys(str(name) for s in all_bars for name in s.at))
    num_of = {"paper": 0, "ours": 0}
    for series in panel.series:
        colours = PAPER_COLOURS if series.whose == "paper" else OUR_COLOURS
        colour = colours[num_of[series.whose] % len(colours)]
        num_of[series.whose] += 1
        label = f"{series.label} ({series.whose})"
        if series.mark == "bars":
            place = all_bars.index(series)
            _draw_bars(axes, series, groups, place, len(all_bars), colour, label)
        else:
            _draw_curve(axes, series, colour, label)
    if groups:
        slanted = len(groups) > MAX_LEVEL_NAMES
        axes.set_xticks(range(len(groups)), groups, rotation=20 if slanted else 0)
        axes.tick_params(axis="x", labelsize=8)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.y_limits is not None:
        axes.set_ylim(panel.y_limits)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=False, axis="x")
    axes.legend()


def _draw_bars(
    axes: Axes,
    series: PlotSeries,
    groups: list[str],
    place: int,
    num_places: int,
    colour: str,
    label: str,
) -> None:
    width = 0.8 / num_places
    left = -0.4 + width * (place + 0.5)
    at = [groups.index(str(name)) + left for name in series.at]
    drawn = axes.bar(at, series.values, width, color=colour, label=label)
    axes.bar_label(drawn, [_short(value) for value in series.values], fontsize=7)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _draw_curve(axes: Axes, series: PlotSeries, colour: str, label: str) -> None:
    at = [float(x) for x in series.at]
    dashed = "--" if series.whose == "paper" else "-"
    match series.mark:
        case "points":
            mark = "x" if series.whose == "paper" else "o"
            axes.plot(at, series.values, mark, color=colour, label=label)
        case "steps":
            axes.step(at, series.values, dashed, where="post", color=colour, label=label)
        case _:
            marker = "o" if len(at) <= 40 else None
            axes.plot(at, series.values, dashed, marker=marker, ms=4, color=colour, label=label)
