"""The series of a run over its time: one time axis for all figures, and what they tell when
pointed at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.report.axis import Axis, time_axis
from moonpool.report.figure import Figure, note
from moonpool.report.series import at_edges
from moonpool.report.svg import HALF, WIDE, Plot, Points
from moonpool.report.words import duration

NUM_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Points
    css: str
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    value: float
    name: str


def over_time(
    title: str,
    how: str,
    series: Sequence[Series],
    make_axis: Callable[[float], Axis],
    words: Callable[[float], str],
    limit: Limit | None = None,
    wide: bool = False,
) -> Figure:
    """A figure of series over the run's time; `make_axis` is given the highest value."""
    if any(len(one.points) < 2 for one in series):
        return Figure(title, how, note("The run was too short to be sampled twice."), wide=wide)
    span_s = max(one.points[-1][0] for one in series)
    highest = max(y for one in series for _, y in one.points)
    if limit is not None and limit.value <= 4 * highest:
        highest = max(highest, limit.value * 1.05)
    y = make_axis(highest)
    plot = Plot(time_axis(span_s, 10 if wide else 6), y, WIDE if wide else HALF)
    for one in series:
        if one.filled:
            plot.area(one.points, one.css)
    for one in series:
        plot.line(one.points, one.css)
    if limit is not None and limit.value <= y.high:
        plot.limit_y(limit.value, limit.name)
    plot.hover(_columns(series, span_s, words))
    key = tuple((one.css, one.name) for one in series)
    return Figure(title, how, plot.svg(title), key if len(series) > 1 else (), wide)


def _columns(
    series: Sequence[Series], span_s: float, words: Callable[[float], str]
) -> list[tuple[float, float, str]]:
    edges = [span_s * n / NUM_COLUMNS for n in range(NUM_COLUMNS + 1)]
    middles = [(edges[n] + edges[n + 1]) / 2 for n in range(NUM_COLUMNS)]
    values = [at_edges(one.points, middles) for one in series]
    columns = []
    for n, middle_s in enumerate(middles):
        lines = [f"at {duration(middle_s)}"]
        lines += [f"{one.name}: {words(values[k][n])}" for k, one in enumerate(series)]
        columns.append((edges[n], edges[n + 1], "\n".join(lines)))
    return columns
