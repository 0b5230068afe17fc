"""A workload whose mix shifts over the day: several kinds at once, each with its own rate by the
hour.

Each kind is drawn by the generator as ever, and its clock then runs fast and slow: all of its
arrivals, further turns too, are moved with it. Ids of different kinds are never equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

import msgspec

from moonpool.trace.generate import generate
from moonpool.trace.profile import GeneratorProfile
from moonpool.trace.row import TraceError, TraceRow
from moonpool.types import Struct


class Kind(Struct, frozen=True):
    """`by_hour`: the rate in equal parts of the day, over the profile's own rate."""

    profile: GeneratorProfile
    by_hour: tuple[float, ...]


class Mix(Struct, frozen=True):
    """After `day_s`, the day begins anew."""

    name: str
    day_s: float
    kinds: tuple[Kind, ...]

    @property
    def rate_rps(self) -> float:
        """Mean over the day."""
        return sum(
            kind.profile.rate_rps * sum(kind.by_hour) / len(kind.by_hour) for kind in self.kinds
        )


def generate_mix(
    mix: Mix,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    rate_rps: float | None = None,
) -> Iterator[TraceRow]:
    """Rows until either limit is reached; `rate_rps` replaces the day's mean. Raises TraceError."""
    if num_requests is None and duration_s is None:
        raise TraceError("a generated trace needs a number of requests or a duration")
    if rate_rps is not None and not 0 < rate_rps < float("inf"):
        raise TraceError(f"rate {rate_rps} is no positive number")
    factor = 1.0 if rate_rps is None else rate_rps / mix.rate_rps
    parts = [
        _rows_of(kind, number, len(mix.kinds), mix.day_s, factor, seed)
        for number, kind in enumerate(mix.kinds)
    ]
    return _until(heapq.merge(*parts, key=lambda row: row.arrived_s), num_requests, duration_s)


def _rows_of(
    kind: Kind, number: int, num_kinds: int, day_s: float, factor: float, seed: int
) -> Iterator[TraceRow]:
    clock = _DayClock(kind.by_hour, day_s)
    rows = generate(
        kind.profile,
        duration_s=float("inf"),
        seed=seed * num_kinds + number,
        rate_rps=kind.profile.rate_rps * factor,
    )
    for row in rows:
        yield msgspec.structs.replace(
            row,
            arrived_s=round(clock.real_s(row.arrived_s) * 1000) / 1000,
            hash_ids=tuple(one * num_kinds + number for one in row.hash_ids),
        )


def _until(
    rows: Iterator[TraceRow], num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRow]:
    for row in islice(rows, num_requests):
        if duration_s is not None and row.arrived_s > duration_s:
            return
        yield row


class _DayClock:
    """Turns time in which the rate is constant into real time."""

    def __init__(self, by_hour: tuple[float, ...], day_s: float) -> None:
        self._by_hour = by_hour
        self._hour_s = day_s / len(by_hour)
        self._hour = 0
        self._even_s = by_hour[0] * self._hour_s  # where the present hour ends

    def real_s(self, even_s: float) -> float:
        """Moments must not fall."""
        while even_s >= self._even_s:
            self._hour += 1
            self._even_s += self._rate * self._hour_s
        return (self._hour + 1) * self._hour_s - (self._even_s - even_s) / self._rate

    @property
    def _rate(self) -> float:
        return self._by_hour[self._hour % len(self._by_hour)]
