"""Axes: where a value lies between two ends, and which round values are worth a label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from moonpool.report.words import duration, short_count

_TIME_STEPS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400),
)
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`; `ticks` are (value, label), an empty label being a mere line."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; what lies outside is at the nearer end."""
        if self.logarithmic:
            value = max(value, self.low)
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def count_axis(
    high: float, unit: str, label: Callable[[float], str] = short_count, num_ticks: int = 5
) -> Axis:
    """From 0 to the round value at or above `high`."""
    step = _round_up(max(high, 1e-9) / num_ticks)
    num_steps = max(ceil(high / step - 1e-9), 1)
    ticks = tuple((number * step, label(number * step)) for number in range(num_steps + 1))
    return Axis(0.0, num_steps * step, ticks, unit)


def share_axis(unit: str) -> Axis:
    return Axis(0.0, 1.0, tuple((n / 4, f"{25 * n} %") for n in range(5)), unit)


def time_axis(span_s: float, num_ticks: int = 10) -> Axis:
    """From 0 to just `span_s`, labelled in one unit of time."""
    span_s = max(span_s, 1e-6)
    wanted_s = span_s / num_ticks
    step_s = round_time_s(wanted_s)
    unit, unit_s = "s", 1.0
    for name, seconds in (("min", 60.0), ("h", 3600.0), ("days", _DAY_S)):
        if step_s >= seconds or (step_s * 2 >= seconds and span_s >= 3 * seconds):
            unit, unit_s = name, seconds
    ticks = []
    for number in range(floor(span_s / step_s + 1e-9) + 1):
        at_s = number * step_s
        ticks.append((at_s, f"{at_s / unit_s:g}"))
    return Axis(0.0, span_s, tuple(ticks), f"simulated time ({unit})")


def latency_axis(low_s: float, high_s: float) -> Axis:
    """Logarithmic, from the round value below to the round value above."""
    high_s = max(high_s, 1e-6)
    low_s = min(max(low_s, high_s * 1e-5), high_s * 0.5)
    low, high = floor(log10(low_s)), ceil(log10(high_s))
    values = [
        mantissa * float(f"1e{power}") for power in range(low, high + 1) for mantissa in (1, 2, 5)
    ]
    first = max((v for v in values if v <= low_s * (1 + 1e-9)), default=values[0])
    last = min((v for v in values if v >= high_s * (1 - 1e-9)), default=values[-1])
    kept = [value for value in values if first <= value <= last]
    few = len(kept) <= 8
    ticks = tuple((v, duration(v) if few or _is_decade(v) else "") for v in kept)
    return Axis(first, last, ticks, "logarithmic scale", logarithmic=True)


def round_time_s(at_least_s: float) -> float:
    """The next span of time that people use."""
    step_s = next((step for step in _TIME_STEPS_S if step >= at_least_s), 0.0)
    return step_s or _round_up(at_least_s / _DAY_S) * _DAY_S


def _is_decade(value: float) -> bool:
    return f"{value:.0e}".startswith("1e")


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 x a power of ten."""
    unit = float(f"1e{floor(log10(value))}")
    for mantissa in (1, 2, 5):
        if value <= mantissa * unit * (1 + 1e-9):
            return mantissa * unit
    return 10 * unit
