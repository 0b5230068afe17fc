"""Drawings as SVG text: a plot with two axes, rows of bars. Colours come from the page's style.

Coordinates are rounded to a tenth, so that the same figures give the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from moonpool.report.axis import Axis

HALF, WIDE = 540, 1100
Points = Sequence[tuple[float, float]]


def tenth(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def drawing(width: int, height: int, label: str, parts: Iterable[str], css: str = "plot") -> str:
    size = f'viewBox="0 0 {width} {height}"'
    head = f'<svg class="{css}" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *parts, "</svg>"])


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    chosen = f' class="{css}"' if css else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{tenth(x)}" y="{tenth(y)}"{chosen}{where}>{escape(words)}</text>'


class Plot:
    """Two axes, and what is drawn between them in the order of the calls."""

    def __init__(self, x: Axis, y: Axis, width: int = HALF, height: int = 250) -> None:
        self._x, self._y = x, y
        self._width, self._height = width, height
        self._left, self._right = 52.0, width - 14.0
        self._top, self._bottom = 24.0, height - 40.0
        self._parts: list[str] = []
        self._draw_axes()

    def at_x(self, value: float) -> float:
        return self._left + (self._right - self._left) * self._x.place(value)

    def at_y(self, value: float) -> float:
        return self._bottom - (self._bottom - self._top) * self._y.place(value)

    def line(self, points: Points, css: str) -> None:
        self._parts.append(f'<path class="line {css}" d="{self._path(points)}"/>')

    def steps(self, points: Points, css: str) -> None:
        """A running count: level until the next point, then straight up to it."""
        corners: list[tuple[float, float]] = []
        for x, y in points:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
        self.line(corners, css)

    def area(self, points: Points, css: str) -> None:
        """What lies under the points."""
        if points:
            left, right = tenth(self.at_x(points[0][0])), tenth(self.at_x(points[-1][0]))
            floor = tenth(self._bottom)
            path = f"{self._path(points)}L{right} {floor}L{left} {floor}Z"
            self._parts.append(f'<path class="area {css}" d="{path}"/>')

    def limit_x(self, value: float, label: str) -> None:
        """A vertical line that is not to be crossed, its label beside it."""
        x = self.at_x(value)
        self._rule(x, self._top, x, self._bottom)
        after = x < self._left + 0.6 * (self._right - self._left)
        place = x + 4 if after else x - 4
        words = text(place, self._bottom - 8, label, "limit", "start" if after else "end")
        self._parts.append(words)

    def limit_y(self, value: float, label: str) -> None:
        y = self.at_y(value)
        self._rule(self._left, y, self._right, y)
        above = y > self._top + 14
        self._parts.append(text(self._right, y - 4 if above else y + 13, label, "limit", "end"))

    def mark(self, x: float, y: float, label: str, css: str) -> None:
        """A point with its words, on whichever side there is room."""
        px, py = self.at_x(x), self.at_y(y)
        dot = f'<circle class="dot {css}" cx="{tenth(px)}" cy="{tenth(py)}" r="3.5"/>'
        fits = px + 8 + 6.4 * len(label) < self._right
        # A rising curve leaves room to the right below it, and to the left above it.
        place, height, side = (px + 8, py + 13, "start") if fits else (px - 8, py - 5, "end")
        words = text(place, height, label, "mark", side)
        self._parts += [dot, words]

    def hover(self, columns: Sequence[tuple[float, float, str]]) -> None:
        """Invisible columns (from, to, words) that tell their words when pointed at."""
        for begin, end, words in columns:
            x, width = self.at_x(begin), self.at_x(end) - self.at_x(begin)
            self._parts.append(
                f'<rect class="tip" x="{tenth(x)}" y="{tenth(self._top)}" width="{tenth(width)}" '
                f'height="{tenth(self._bottom - self._top)}"><title>{escape(words)}</title></rect>'
            )

    def svg(self, label: str) -> str:
        return drawing(self._width, self._height, label, self._parts)

    def _path(self, points: Points) -> str:
        places: list[str] = []
        for x, y in points:
            place = f"{tenth(self.at_x(x))} {tenth(self.at_y(y))}"
            if not places or places[-1] != place:
                places.append(place)
        if len(places) == 1:
            places *= 2  # a dot
        return "M" + "L".join(places) if places else ""

    def _rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = f'x1="{tenth(x1)}" y1="{tenth(y1)}" x2="{tenth(x2)}" y2="{tenth(y2)}"'
        self._parts.append(f'<line class="bound" {ends}/>')

    def _draw_axes(self) -> None:
        grid: list[str] = []
        right, bottom = tenth(self._right), tenth(self._bottom)
        for value, label in self._y.ticks:
            y = self.at_y(value)
            grid.append(f"M{tenth(self._left)} {tenth(y)}H{right}")
            self._parts.append(text(self._left - 6, y + 4, label, anchor="end"))
        for value, label in self._x.ticks:
            x = self.at_x(value)
            rise = self._top if self._x.logarithmic else self._bottom + 4
            grid.append(f"M{tenth(x)} {bottom}V{tenth(rise)}")
            # The last label would stick out of the drawing.
            side = "end" if x > self._right - 6 and len(label) > 3 else "middle"
            if label:
                self._parts.append(text(x, self._bottom + 17, label, anchor=side))
        base = f'<path class="base" d="M{tenth(self._left)} {bottom}H{right}"/>'
        self._parts.insert(0, f'<path class="grid" d="{"".join(grid)}"/>')
        middle = (self._left + self._right) / 2
        self._parts += [
            base,
            text(self._left - 6, 11, self._y.unit, "unit"),
            text(middle, self._height - 5, self._x.unit, "unit", "middle"),
        ]


def bars(
    rows: Sequence[tuple[str, float, str, str]],
    label: str,
    label_width: int = 150,
) -> str:
    """Rows of (name, value, words, colour), the longest bar filling the width."""
    most = max((value for _, value, _, _ in rows), default=0.0) or 1.0
    longest = max((len(words) for _, _, words, _ in rows), default=0)
    room = HALF - label_width - 12 - 6.6 * longest - 8
    parts = []
    for number, (name, value, words, css) in enumerate(rows):
        y = 6 + 30 * number
        length = max(room * max(value, 0.0) / most, 1.0)
        parts.append(text(label_width, y + 15, name, anchor="end"))
        parts.append(
            f'<rect class="bar {css}" x="{label_width + 10}" y="{y}" width="{tenth(length)}" '
            f'height="21" rx="2"/>'
        )
        parts.append(text(label_width + 16 + length, y + 15, words, "value"))
    return drawing(HALF, 30 * len(rows) + 6, label, parts, "bars")
