"""What a plot shows, as data: `draw` makes a picture of it.

A finding has panels, which stand side by side; a panel has series, of the paper and of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Whose = Literal["paper", "ours"]
Mark = Literal["bars", "line", "steps", "points"]


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """`values[i]` is drawn at `at[i]`, which is a number, or the name of a group of bars."""

    label: str
    whose: Whose
    mark: Mark
    at: tuple[float, ...] | tuple[str, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.at) == len(self.values), self.label
        named = any(isinstance(x, str) for x in self.at)
        assert named == (self.mark == "bars"), f"{self.label}: bars have names, others numbers"


@dataclass(frozen=True, slots=True)
class Panel:
    """The series of bars of one panel use the same names of groups; a series that lacks a group
    leaves a gap. The labels of the axes state the units."""

    title: str
    x_label: str
    y_label: str
    series: tuple[PlotSeries, ...]
    log_x: bool = False
    log_y: bool = False
    y_limits: tuple[float, float] | None = None  # None: what the values need


def bars(label: str, whose: Whose, values: dict[str, float]) -> PlotSeries:
    return PlotSeries(label, whose, "bars", tuple(values), tuple(values.values()))
