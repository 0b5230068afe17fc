"""How long answered requests took, relative to their SLOs: a run can then be judged by other SLOs.

A run's requests were admitted and batched under its own SLOs, so that the share within other ones
is an estimate. It is low for longer SLOs, under which fewer requests would have been refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from moonpool.request_record import RequestRecord
from moonpool.types import Struct

MULTIPLES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Multiples of an SLO by which a run can be judged."""


class ClassOutcome(Struct, frozen=True):
    """What the requests of one class got; "" is the class of those that name none.

    `times` of those that were answered: (number of the least multiple of the TTFT SLO that it kept,
    likewise of the TBT SLO, requests). A number past the last multiple: it kept none.
    """

    name: str
    num_requests: int
    num_effective: int
    times: tuple[tuple[int, int, int], ...] = ()

    def num_within(self, ttft: int, tbt: int) -> int:
        """Requests within these multiples of their SLOs, by their numbers in MULTIPLES."""
        return sum(number for first, then, number in self.times if first <= ttft and then <= tbt)


class LatencyTable:
    """Counts the requests of a run."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._effective: Counter[str] = Counter()
        self._times: Counter[tuple[str, int, int]] = Counter()

    def add(self, record: RequestRecord, slo_class: str, answered: bool) -> None:
        self._requests[slo_class] += 1
        self._effective[slo_class] += record.effective
        if answered:
            ttft = bisect_left(MULTIPLES, (record.ttft_s or 0.0) / record.slo.ttft_s)
            tbt = bisect_left(MULTIPLES, (record.tbt_top10_mean_s or 0.0) / record.slo.tbt_s)
            self._times[slo_class, ttft, tbt] += 1

    def classes(self) -> tuple[ClassOutcome, ...]:
        """The classes by name."""
        return tuple(
            ClassOutcome(
                name,
                self._requests[name],
                self._effective[name],
                tuple(
                    (ttft, tbt, number)
                    for (of, ttft, tbt), number in sorted(self._times.items())
                    if of == name
                ),
            )
            for name in sorted(self._requests)
        )
