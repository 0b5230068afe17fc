"""Heat strips: a row per name, darker where its share is higher, over one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from moonpool.report.axis import Axis
from moonpool.report.svg import WIDE, drawing, tenth, text

NUM_LEVELS = 10
_LEFT, _RIGHT = 110.0, WIDE - 62.0
_ROW, _THICK, _GROUP_GAP = 17.0, 14.0, 10.0


@dataclass(frozen=True, slots=True)
class Strip:
    """`shares` are of the windows between the common edges; a new `group` stands a little apart."""

    name: str
    group: str
    shares: tuple[float, ...]
    note: str  # at the right
    words: str  # when pointed at


def heat_strips(strips: Sequence[Strip], edges: Sequence[float], time: Axis, label: str) -> str:
    parts: list[str] = []
    y = 6.0
    places = [_LEFT + (_RIGHT - _LEFT) * time.place(edge) for edge in edges]
    for number, strip in enumerate(strips):
        if number and strip.group != strips[number - 1].group:
            y += _GROUP_GAP
        middle = y + _ROW / 2
        parts.append(text(_LEFT - 8, middle + 4, strip.name, anchor="end"))
        parts.append(f"<g><title>{escape(strip.words)}</title>")
        parts += _paths(strip.shares, places, middle)
        parts.append("</g>")
        parts.append(text(_RIGHT + 8, middle + 4, strip.note))
        y += _ROW
    for value, words in time.ticks:
        x = _LEFT + (_RIGHT - _LEFT) * time.place(value)
        parts.append(f'<path class="grid" d="M{tenth(x)} {tenth(y + 2)}v4"/>')
        parts.append(text(x, y + 19, words, anchor="middle"))
    parts.append(text((_LEFT + _RIGHT) / 2, y + 36, time.unit, "unit", "middle"))
    return drawing(WIDE, round(y + 42), label, parts)


def _paths(shares: Sequence[float], edges: Sequence[float], y: float) -> list[str]:
    """One path per level: far smaller than a rectangle per cell."""
    runs: list[list[str]] = [[] for _ in range(NUM_LEVELS + 1)]
    begin = 0
    levels = [_level(share) for share in shares]
    for number in range(1, len(levels) + 1):
        if number == len(levels) or levels[number] != levels[begin]:
            x, width = edges[begin], edges[number] - edges[begin]
            runs[levels[begin]].append(f"M{tenth(x)} {tenth(y)}h{tenth(width)}")
            begin = number
    return [
        f'<path class="heat h{level}" d="{"".join(moves)}"/>'
        for level, moves in enumerate(runs)
        if moves
    ]


def _level(share: float) -> int:
    """0 only for none at all."""
    share = min(max(share, 0.0), 1.0)
    return 0 if share < 0.005 else max(round(share * NUM_LEVELS), 1)
