"""Charts as SVG text: axes, lines, areas, limits, marks, bars, heat strips and hover texts.

Why not a plotting library: the report is one self-contained page that runs no script and gives the
same bytes for the same run. A page with 16 figures takes 100 to 150 kB, with hover texts. Plotly
embeds a script library of 3 to 4 MB; the SVG of matplotlib has neither hover texts nor colours that
follow the reader's light or dark mode. Colours are the CSS classes c1 to c5 of the page.
Coordinates are rounded to a tenth of a pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from markupsafe import Markup

from moonpool.pages.units import duration, short_count

HALF, WIDE = 540, 1100
"""Width of a chart in a half column and over the whole page, in the chart's own pixels."""
HEIGHT = 250  # height of a plot, in pixels
NUM_TICKS = 5
Points = Sequence[tuple[float, float]]

_TIME_STEPS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400),
)
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`. `ticks` are (value, label); the label may be empty."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Position from 0 (low end) to 1 (high end); values outside are moved to the nearer end."""
        if self.logarithmic:
            value = max(value, self.low)
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def count_axis(high: float, unit: str) -> Axis:
    """Returns an axis from 0 to the round value at or above `high`, or to 1 if `high` is 0."""
    step = _round_up((high if high > 1e-9 else 1.0) / NUM_TICKS)
    num_steps = ceil(high / step - 1e-9) if high > 1e-9 else NUM_TICKS
    ticks = tuple((number * step, short_count(number * step)) for number in range(num_steps + 1))
    return Axis(0.0, num_steps * step, ticks, unit)


def share_axis(unit: str) -> Axis:
    """Returns an axis for shares: from 0 to 1, labelled from 0 to 100 %."""
    return Axis(0.0, 1.0, tuple((n / 4, f"{25 * n} %") for n in range(5)), unit)


def time_axis(span_s: float, num_ticks: int = 10) -> Axis:
    """Returns an axis of simulated time from 0 to `span_s`, labelled in one unit of time."""
    span_s = max(span_s, 1e-6)
    step_s = round_time_s(span_s / num_ticks)
    unit, unit_s = "s", 1.0
    for name, seconds in (("min", 60.0), ("h", 3600.0), ("days", _DAY_S)):
        if step_s >= seconds or (step_s * 2 >= seconds and span_s >= 3 * seconds):
            unit, unit_s = name, seconds
    num_steps = floor(span_s / step_s + 1e-9)
    ticks = tuple((n * step_s, f"{n * step_s / unit_s:g}") for n in range(num_steps + 1))
    return Axis(0.0, span_s, ticks, f"simulated time ({unit})")


def latency_axis(low_s: float, high_s: float) -> Axis:
    """Returns a logarithmic axis, from the round value at or below `low_s` to the one at or above
    `high_s`."""
    high_s = max(high_s, 1e-6)
    low_s = min(max(low_s, high_s * 1e-5), high_s * 0.5)
    powers = range(floor(log10(low_s)), ceil(log10(high_s)) + 1)
    values = [mantissa * float(f"1e{power}") for power in powers for mantissa in (1, 2, 5)]
    first = max((v for v in values if v <= low_s * (1 + 1e-9)), default=values[0])
    last = min((v for v in values if v >= high_s * (1 - 1e-9)), default=values[-1])
    kept = [value for value in values if first <= value <= last]
    few = len(kept) <= 8  # with more ticks, only powers of ten have a label
    ticks = tuple((v, duration(v) if few or f"{v:.0e}".startswith("1e") else "") for v in kept)
    return Axis(first, last, ticks, "logarithmic scale", logarithmic=True)


def round_time_s(at_least_s: float) -> float:
    """Returns the next customary time step, for example 15 s, 2 min or 6 h."""
    step_s = next((step for step in _TIME_STEPS_S if step >= at_least_s), 0.0)
    return step_s or _round_up(at_least_s / _DAY_S) * _DAY_S


def _round_up(value: float) -> float:
    """Returns the next number of the form 1, 2 or 5 x a power of ten."""
    unit = float(f"1e{floor(log10(value))}")
    return next((m * unit for m in (1, 2, 5) if value <= m * unit * (1 + 1e-9)), 10 * unit)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, label: str, css: str = "", anchor: str = "start") -> str:
    chosen = f' class="{css}"' if css else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_px(x)}" y="{_px(y)}"{chosen}{where}>{escape(label)}</text>'


def _svg(width: int, height: int, label: str, parts: Iterable[str], css: str = "plot") -> Markup:
    head = (
        f'<svg class="{css}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">'
    )
    return Markup("\n".join([head, *parts, "</svg>"]))  # noqa: S704 (all text is escaped)


class Plot:
    """A chart with two axes. Later calls draw over earlier ones."""

    def __init__(self, x: Axis, y: Axis, width: int = HALF) -> None:
        self._x, self._y = x, y
        self._width, self._height = width, HEIGHT
        self._left, self._right = 52.0, width - 14.0
        self._top, self._bottom = 24.0, HEIGHT - 40.0
        self._parts: list[str] = []
        self._draw_axes()

    def at_x(self, value: float) -> float:
        """The x coordinate of a value, in pixels."""
        return self._left + (self._right - self._left) * self._x.place(value)

    def at_y(self, value: float) -> float:
        """The y coordinate of a value, in pixels; 0 is the top."""
        return self._bottom - (self._bottom - self._top) * self._y.place(value)

    def line(self, points: Points, css: str) -> None:
        """A line through the points."""
        self._parts.append(f'<path class="line {css}" d="{self._path(points)}"/>')

    def steps(self, points: Points, css: str) -> None:
        """Draws a step function: level until the next point, then straight up to that point."""
        corners = [*points[:1]]
        for (_, before), (x, y) in pairwise(points):
            corners += [(x, before), (x, y)]
        self.line(corners, css)

    def area(self, points: Points, css: str) -> None:
        """Fills the area between the points and the x axis."""
        if points:
            left, right = _px(self.at_x(points[0][0])), _px(self.at_x(points[-1][0]))
            floor_y = _px(self._bottom)
            path = f"{self._path(points)}L{right} {floor_y}L{left} {floor_y}Z"
            self._parts.append(f'<path class="area {css}" d="{path}"/>')

    def limit_x(self, value: float, label: str) -> None:
        """A dashed vertical line with its label."""
        x = self.at_x(value)
        self._dashed(x, self._top, x, self._bottom)
        on_right = x < self._left + 0.6 * (self._right - self._left)
        place, side = (x + 4, "start") if on_right else (x - 4, "end")
        self._parts.append(_text(place, self._bottom - 8, label, "limit", side))

    def limit_y(self, value: float, label: str) -> None:
        """A dashed horizontal line with its label."""
        y = self.at_y(value)
        self._dashed(self._left, y, self._right, y)
        place = y - 4 if y > self._top + 14 else y + 13
        self._parts.append(_text(self._right, place, label, "limit", "end"))

    def mark(self, x: float, y: float, label: str, css: str) -> None:
        """A dot with its label, on the side that has room."""
        px, py = self.at_x(x), self.at_y(y)
        self._parts.append(f'<circle class="dot {css}" cx="{_px(px)}" cy="{_px(py)}" r="3.5"/>')
        fits = px + 8 + 6.4 * len(label) < self._right
        # A rising curve leaves room to the right below it, and to the left above it.
        place, height, side = (px + 8, py + 13, "start") if fits else (px - 8, py - 5, "end")
        self._parts.append(_text(place, height, label, "mark", side))

    def hover(self, columns: Iterable[tuple[float, float, str]]) -> None:
        """Invisible columns (from, to, text) that show their text under the pointer."""
        y, height = _px(self._top), _px(self._bottom - self._top)
        for begin, end, caption in columns:
            x = self.at_x(begin)
            self._parts.append(
                f'<rect class="tip" x="{_px(x)}" y="{y}" width="{_px(self.at_x(end) - x)}" '
                f'height="{height}"><title>{escape(caption)}</title></rect>'
            )

    def svg(self, label: str) -> Markup:
        """The finished chart. `label` names the chart for screen readers."""
        return _svg(self._width, self._height, label, self._parts)

    def _path(self, points: Points) -> str:
        places: list[str] = []
        for x, y in points:
            place = f"{_px(self.at_x(x))} {_px(self.at_y(y))}"
            if not places or places[-1] != place:
                places.append(place)
        if len(places) == 1:
            places *= 2  # a dot
        return "M" + "L".join(places) if places else ""

    def _dashed(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = f'x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"'
        self._parts.append(f'<line class="bound" {ends}/>')

    def _draw_axes(self) -> None:
        grid, labels = "", []
        left, right, bottom = _px(self._left), _px(self._right), _px(self._bottom)
        for value, label in self._y.ticks:
            y = self.at_y(value)
            grid += f"M{left} {_px(y)}H{right}"
            labels.append(_text(self._left - 6, y + 4, label, anchor="end"))
        for value, label in self._x.ticks:
            x = self.at_x(value)
            end = self._top if self._x.logarithmic else self._bottom + 4
            grid += f"M{_px(x)} {bottom}V{_px(end)}"
            # Centred, the last label would stick out of the chart.
            side = "end" if x > self._right - 6 and len(label) > 3 else "middle"
            if label:
                labels.append(_text(x, self._bottom + 17, label, anchor=side))
        middle = (self._left + self._right) / 2
        self._parts += [
            f'<path class="grid" d="{grid}"/>',
            *labels,
            f'<path class="base" d="M{left} {bottom}H{right}"/>',
            _text(self._left - 6, 11, self._y.unit, "unit"),
            _text(middle, self._height - 5, self._x.unit, "unit", "middle"),
        ]


def bars(rows: Sequence[tuple[str, float, str, str]], label: str, label_width: int = 150) -> Markup:
    """Horizontal bars. A row is (name, value, text at the bar, colour class)."""
    most = max((value for _, value, _, _ in rows), default=0.0) or 1.0
    longest = max((len(caption) for _, _, caption, _ in rows), default=0)
    room = HALF - label_width - 12 - 6.6 * longest - 8
    parts = []
    for number, (name, value, caption, css) in enumerate(rows):
        y = 6 + 30 * number
        length = max(room * max(value, 0.0) / most, 1.0)
        place = f'x="{label_width + 10}" y="{y}" width="{_px(length)}" height="21"'
        parts += [
            _text(label_width, y + 15, name, anchor="end"),
            f'<rect class="bar {css}" {place} rx="2"/>',
            _text(label_width + 16 + length, y + 15, caption, "value"),
        ]
    return _svg(HALF, 30 * len(rows) + 6, label, parts, "bars")


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One row of a heat map. `shares`: one value from 0 to 1 for each window between the common
    edges."""

    name: str
    group: str  # rows of different groups have a gap between them
    shares: Sequence[float]
    note: str  # text at the right end of the row
    hover: str


def heat_map(rows: Sequence[HeatRow], edges: Sequence[float], time: Axis, label: str) -> Markup:
    """Rows over one time axis, darker where the share is higher."""
    left, right, row_height, group_gap = 110.0, WIDE - 62.0, 17.0, 10.0
    places = [left + (right - left) * time.place(edge) for edge in edges]
    parts: list[str] = []
    y = 6.0
    for number, row in enumerate(rows):
        if number and row.group != rows[number - 1].group:
            y += group_gap
        middle = y + row_height / 2
        parts += [
            _text(left - 8, middle + 4, row.name, anchor="end"),
            f"<g><title>{escape(row.hover)}</title>",
            *_heat_paths(row.shares, places, middle),
            "</g>",
            _text(right + 8, middle + 4, row.note),
        ]
        y += row_height
    for value, caption in time.ticks:
        x = left + (right - left) * time.place(value)
        parts.append(f'<path class="grid" d="M{_px(x)} {_px(y + 2)}v4"/>')
        parts.append(_text(x, y + 19, caption, anchor="middle"))
    parts.append(_text((left + right) / 2, y + 36, time.unit, "unit", "middle"))
    return _svg(WIDE, round(y + 42), label, parts)


def _heat_paths(shares: Sequence[float], edges: Sequence[float], y: float) -> list[str]:
    """Returns one path per level, h0 (no share at all) to h10, which is far smaller than one
    rectangle per cell."""
    levels = [0 if share < 0.005 else max(round(min(share, 1.0) * 10), 1) for share in shares]
    moves: dict[int, str] = dict.fromkeys(range(11), "")
    begin = 0
    for number in range(1, len(levels) + 1):
        if number == len(levels) or levels[number] != levels[begin]:
            width = edges[number] - edges[begin]
            moves[levels[begin]] += f"M{_px(edges[begin])} {_px(y)}h{_px(width)}"
            begin = number
    return [f'<path class="heat h{level}" d="{d}"/>' for level, d in moves.items() if d]
