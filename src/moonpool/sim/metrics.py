"""Records the figures of a run, in memory that does not grow with the number of requests.

`Timeline` keeps a sampled series, `Collector` the figures of all requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from moonpool.distributions import Histogram, rounded
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId

MAX_SAMPLES = 1440
MAX_TENANTS = 1000
OTHER_TENANTS = "(others)"
COMPLETED = ("stop", "length")
"""The outcomes of an answered request."""


class Timeline:
    """Named figures, sampled every `interval_s`.

    Beyond MAX_SAMPLES rows, every second row is dropped and `interval_s` doubles.
    """

    def __init__(self, names: tuple[str, ...], interval_s: float) -> None:
        assert interval_s > 0
        self.names = names
        self.interval_s = interval_s
        self.rows: list[tuple[float, ...]] = []

    def add(self, time_s: float, values: tuple[float, ...]) -> None:
        assert len(values) == len(self.names)
        self.rows.append((time_s, *values))
        if len(self.rows) > MAX_SAMPLES:
            self.rows = self.rows[::2]
            self.interval_s *= 2

    def series(self, name: str) -> list[tuple[float, float]]:
        """Returns the samples of one figure as (time, value)."""
        column = self.names.index(name) + 1
        return [(row[0], row[column]) for row in self.rows]


class GroupFigures:
    """The figures of the requests of one tenant or of one class."""

    __slots__ = (
        "hit_tokens",
        "input_tokens",
        "num_completed",
        "num_effective",
        "num_requests",
        "output_tokens",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_completed = 0
        self.num_effective = 0
        self.input_tokens = 0
        self.hit_tokens = 0
        self.output_tokens = 0
        self.ttft_s = Histogram()

    def add(self, record: RequestRecord) -> None:
        """Adds a request that has ended."""
        self.num_requests += 1
        if record.outcome in COMPLETED and record.ttft_s is not None:
            self.num_completed += 1
            self.num_effective += record.effective
            self.input_tokens += record.num_prompt_tokens
            self.hit_tokens += record.cached_tokens
            self.output_tokens += record.num_generated_tokens
            self.ttft_s.add(record.ttft_s)

    def summary(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "completed": self.num_completed,
            "effective": self.num_effective,
            "output_tokens": self.output_tokens,
            "hit_ratio": rounded(self.hit_tokens / max(self.input_tokens, 1)),
            "ttft_s": self.ttft_s.summary(),
        }


class Collector(GroupFigures):
    """Sums and distributions over all requests, taken from their records as they end."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failed = 0
        self.rejected: Counter[str] = Counter()
        self.fetched_tokens = 0
        self.loaded_tokens = 0
        self.wasted_prefill_s = 0.0
        self.num_wasted = 0
        self.gap_s = Histogram()
        self.tbt_top10_mean_s = Histogram()
        self.prefill_compute_s = Histogram()
        self.stages_s: dict[str, float] = {}
        self.ttft_error_s = Histogram()
        self.ttft_bias_s = 0.0
        self.slo_classes: dict[str, GroupFigures] = {}
        self._tenants: dict[str, GroupFigures] = {}
        self._refused: dict[RequestId, tuple[int, str]] = {}
        self._prefill_s: dict[RequestId, float] = {}

    def note_prefill(self, request_id: RequestId, seconds: float) -> None:
        """Adds compute time that a step spent on the request's prompt."""
        self._prefill_s[request_id] = self._prefill_s.get(request_id, 0.0) + seconds

    def note_refused(self, request_id: RequestId, status: int, reason: str) -> None:
        """Keeps status and reason until the request ends."""
        self._refused[request_id] = (status, reason)

    def forget(self, request_id: RequestId) -> None:
        """Forgets a refused request that its client will send again, because only the last try of
        a request counts."""
        self._refused.pop(request_id, None)
        self._prefill_s.pop(request_id, None)

    def note_ended(self, record: RequestRecord, slo_class: str = "") -> None:
        """Adds an ended request of the class `slo_class`. The record is not kept."""
        gap_runs = record.gap_runs
        if record.outcome in COMPLETED:
            record.forget_gaps()  # the collector keeps the gaps itself, sorted for the TBT figures
        self.add(record)
        self._note_tenant(record)
        if slo_class:
            self.slo_classes.setdefault(slo_class, GroupFigures()).add(record)
        prefill_s = self._prefill_s.pop(record.request_id, 0.0)
        status, reason = self._refused.pop(record.request_id, (0, ""))
        if record.outcome in COMPLETED:
            self._note_completed(record, gap_runs, prefill_s)
            return
        if prefill_s:
            self.wasted_prefill_s += prefill_s
            self.num_wasted += 1
        if status in (422, 429, 503):
            self.rejected[reason] += 1
        else:
            self.num_failed += 1

    def tenants(self) -> dict[str, GroupFigures]:
        """Returns the figures by tenant, if there are several tenants or the only tenant has a
        name. Tenants beyond MAX_TENANTS count as one tenant, named OTHER_TENANTS."""
        return self._tenants if self._tenants.keys() - {""} else {}

    def _note_tenant(self, record: RequestRecord) -> None:
        is_known = record.tenant in self._tenants or len(self._tenants) < MAX_TENANTS
        name = record.tenant if is_known else OTHER_TENANTS
        self._tenants.setdefault(name, GroupFigures()).add(record)

    def _note_gaps(self, gap_runs: Sequence[tuple[float, int]]) -> None:
        """Adds the gaps of a completed request as (seconds, number of such gaps in a row)."""
        for gap_s, number in gap_runs:
            self.gap_s.add(max(gap_s, 0.0), number)

    def _note_completed(
        self, record: RequestRecord, gap_runs: Sequence[tuple[float, int]], prefill_s: float
    ) -> None:
        self.fetched_tokens += record.fetched_tokens
        self.loaded_tokens += record.loaded_tokens
        self.prefill_compute_s.add(prefill_s)
        ttft_s = record.ttft_s
        assert ttft_s is not None
        if record.expected_ttft_s is not None:
            error_s = record.expected_ttft_s - ttft_s
            self.ttft_error_s.add(abs(error_s))
            self.ttft_bias_s += error_s
        self._note_gaps(gap_runs)
        top_s = record.tbt_top10_mean_s
        if top_s is not None:
            self.tbt_top10_mean_s.add(max(top_s, 0.0))
        for stage, seconds in record.stages_s().items():
            self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
