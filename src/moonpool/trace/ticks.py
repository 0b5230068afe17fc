"""Finds the step to which a trace's times were rounded, and spreads rows over it again.

Mooncake's conversation trace is rounded to 3 s: replayed as it stands, it measures bursts of ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.trace.parsed import Parsed

SAMPLE_ROWS = 8192
_MIN_ROWS_PER_TIME = 1.05  # fewer ties than this are chance, or change nothing
_MIN_REGULAR = 0.95
_TOLERANCE = 0.01


def find_tick(times: Iterable[float]) -> float:
    """The rounding step of rising `times`, in their unit; 0.0 where rows hardly share times, or
    where the gaps between times are not multiples of one step."""
    num_rows = 0
    gaps: list[float] = []
    last: float | None = None
    for time in times:
        num_rows += 1
        if last is not None and time > last:
            gaps.append(time - last)
        last = time
    if len(gaps) < 2 or num_rows < _MIN_ROWS_PER_TIME * (len(gaps) + 1):
        return 0.0
    step = sorted(gaps)[len(gaps) // 100]
    single = [gap for gap in gaps if round(gap / step) == 1]
    step = sum(single) / len(single)
    regular = sum(_is_multiple(gap, step) for gap in gaps)
    return step if regular >= _MIN_REGULAR * len(gaps) else 0.0


def _is_multiple(gap: float, step: float) -> bool:
    return abs(gap - round(gap / step) * step) <= _TOLERANCE * step


def spread(rows: Iterable[Parsed], tick: float) -> Iterator[Parsed]:
    """Rows that share a time are spaced evenly over the tick that begins there, in their order.

    Evenly, not at random: it needs no seed, keeps the file's order, and adds no bursts of its own.
    Holds the rows of one tick.
    """
    group: list[Parsed] = []
    for row in rows:
        if group and row.time != group[0].time:
            yield from _spaced(group, min(tick, row.time - group[0].time))
            group.clear()
        group.append(row)
    yield from _spaced(group, tick)


def _spaced(group: list[Parsed], span: float) -> Iterator[Parsed]:
    if len(group) == 1:
        yield group[0]
        return
    for index, row in enumerate(group):
        yield row._replace(time=row.time + span * index / len(group))
