"""Makes the report's charts with their titles: series over the run's time, and distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from moonpool.distributions import Histogram
from moonpool.pages.chart import (
    HALF,
    WIDE,
    Axis,
    Plot,
    Points,
    latency_axis,
    round_time_s,
    share_axis,
    time_axis,
)
from moonpool.pages.units import duration, percent

NUM_HOVER_COLUMNS = 60
NUM_CURVE_POINTS = 250
NO_REQUEST = "No request was answered."
TOO_SHORT = "The run was too short to be sampled twice."


class Table(NamedTuple):
    """A table whose first column names the row, and whose other columns are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A chart or a table with an explanation, or a note if there is nothing to show.

    `key` is the legend: (colour class, name). All text is plain; the template escapes it.
    """

    title: str
    how: str
    chart: Markup | None = None
    table: Table | None = None
    note: str = ""
    key: tuple[tuple[str, str], ...] = ()
    wide: bool = False


class Series(NamedTuple):
    """A named line over the run's time."""

    name: str
    points: Points
    css: str
    filled: bool = False


class Limit(NamedTuple):
    """A dashed line over a series, with its label."""

    value: float
    name: str


def over_time(
    title: str,
    how: str,
    series: Sequence[Series],
    make_axis: Callable[[float], Axis],
    label: Callable[[float], str],
    limit: Limit | None = None,
    wide: bool = False,
) -> ReportFigure:
    """Draws series over the run's time. `make_axis` takes the highest value, `label` any value."""
    if any(len(one.points) < 2 for one in series):
        return ReportFigure(title, how, note=TOO_SHORT, wide=wide)
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
    plot.hover(_hover_columns(series, span_s, label))
    key = tuple((one.css, one.name) for one in series) if len(series) > 1 else ()
    return ReportFigure(title, how, plot.svg(title), key=key, wide=wide)


def distribution(
    title: str, how: str, curves: Sequence[tuple[str, str, Histogram]], slo_s: float | None = None
) -> ReportFigure:
    """Draws cumulative distributions of seconds. A curve is (colour class, name, values); the first
    curve has marks at p50, p90 and p99."""
    drawn = [(css, name, values) for css, name, values in curves if values.count]
    if not drawn:
        return ReportFigure(title, how, note=NO_REQUEST)
    low_s = min(values.quantile(0.002) for _, _, values in drawn)
    high_s = max(values.largest for _, _, values in drawn)
    x = latency_axis(min(low_s, slo_s or low_s), max(high_s, slo_s or high_s))
    plot = Plot(x, share_axis("share at or below"))
    css, _, values = drawn[0]
    if slo_s is not None:
        plot.limit_x(slo_s, f"SLO {duration(slo_s)}: {percent(values.share_up_to(slo_s))}")
    for line_css, _, line_values in reversed(drawn):
        points = line_values.curve(NUM_CURVE_POINTS)
        plot.steps([(points[0][0], 0.0), *points], line_css)
    for share in (0.5, 0.9, 0.99):
        at_s = values.quantile(share)
        plot.mark(at_s, share, f"p{share * 100:g} {duration(at_s)}", css)
    key = tuple((css, name) for css, name, _ in drawn) if len(drawn) > 1 else ()
    return ReportFigure(title, how, plot.svg(title), key=key)


def _hover_columns(
    series: Sequence[Series], span_s: float, label: Callable[[float], str]
) -> list[tuple[float, float, str]]:
    edges = [span_s * n / NUM_HOVER_COLUMNS for n in range(NUM_HOVER_COLUMNS + 1)]
    middles = [(begin + end) / 2 for begin, end in pairwise(edges)]
    values = [values_at(one.points, middles) for one in series]
    columns = []
    for n, middle_s in enumerate(middles):
        lines = [f"at {duration(middle_s)}"]
        lines += [f"{one.name}: {label(values[k][n])}" for k, one in enumerate(series)]
        columns.append((edges[n], edges[n + 1], "\n".join(lines)))
    return columns


def values_at(points: Points, instants: Sequence[float]) -> list[float]:
    """Returns the values of a sampled series at other instants, by linear interpolation."""
    x, y = zip(*points, strict=True)
    return [float(value) for value in np.interp(instants, x, y)]


def window_edges(points: Points, most: int) -> list[float]:
    """Divides the span of the series into at most `most` windows of a round length, each at least
    as long as a sample. The last window has 0.5 to 1.5 times this length."""
    begin_s, end_s = points[0][0], points[-1][0]
    if len(points) < 2:
        return [begin_s, begin_s + 1.0]
    span_s = end_s - begin_s
    window_s = round_time_s(span_s / min(most, len(points) - 1) * (1 - 1e-9))
    number = max(round(span_s / window_s), 1)
    return [*(begin_s + n * window_s for n in range(number)), end_s]


def rates(points: Points, edges: Sequence[float]) -> list[tuple[float, float]]:
    """Returns (middle of the window, increase per second in the window) of a running count."""
    values = values_at(points, edges)
    return [
        ((edges[n] + edges[n + 1]) / 2, (values[n + 1] - values[n]) / (edges[n + 1] - edges[n]))
        for n in range(len(edges) - 1)
    ]


def thinned(points: Points, most: int = 360) -> list[tuple[float, float]]:
    """Returns at most `most` points, each the mean of neighbours. Infinite samples are left out."""
    finite = [(x, y) for x, y in points if isfinite(y)]
    size = -(-len(finite) // most)
    if size <= 1:
        return finite
    groups = [finite[n : n + size] for n in range(0, len(finite), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def busy_shares(points: Points, edges: Sequence[float]) -> tuple[float, ...]:
    """Returns the busy share of each window, from a running count of busy seconds.

    Decode steps that were simulated together count when the last step ends. So a window may count
    more busy seconds than its length, and passes the excess to the window before.
    """
    values = values_at(points, edges)
    shares = [0.0] * (len(edges) - 1)
    excess_s = 0.0
    for n in range(len(shares) - 1, -1, -1):
        window_s = edges[n + 1] - edges[n]
        busy_s = values[n + 1] - values[n] + excess_s
        excess_s = max(busy_s - window_s, 0.0)
        shares[n] = min(max(busy_s, 0.0), window_s) / window_s
    return tuple(shares)
