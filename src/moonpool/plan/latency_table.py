"""Counts answered requests by their latency relative to their SLOs, so that a run can be judged by
other SLOs.

A run's requests were admitted and batched under its own SLOs, so the share within other SLOs is an
estimate. For longer SLOs the estimate is low, because fewer requests would have been refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from moonpool.request_record import RequestRecord
from moonpool.types import Struct

MULTIPLES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Multiples of an SLO by which a run can be judged."""


class ClassOutcome(Struct, frozen=True):
    """The outcome of one class of requests; "" is the class of requests that name no class.

    `times` counts the answered requests as (index in MULTIPLES of the least multiple of the TTFT
    SLO that they kept, the same index for the TBT SLO, number of requests). An index past the last
    multiple means that the requests kept no multiple.
    """

    name: str
    num_requests: int
    num_effective: int
    times: tuple[tuple[int, int, int], ...] = ()

    def num_within(self, ttft: int, tbt: int) -> int:
        """Returns the number of requests within two multiples of their SLOs, given as indices in
        MULTIPLES."""
        return sum(number for first, then, number in self.times if first <= ttft and then <= tbt)


class LatencyTable:
    """Counts the requests of a run by class and time."""

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
        """Returns the outcomes of all classes, ordered by name."""
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
