"""What a simulation found: figures of all requests, in memory that does not grow with their
number."""

from __future__ import annotations

from collections import Counter

from moonpool.metrics import RequestRecord
from moonpool.sim.histogram import Histogram
from moonpool.types import RequestId

COMPLETED = ("stop", "length")


class Collector:
    """Hears of each request's end, and of the seconds spent on its prompt meanwhile."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_completed = 0
        self.num_effective = 0
        self.num_failed = 0
        self.rejected: Counter[str] = Counter()
        self.input_tokens = 0
        self.hit_tokens = 0
        self.fetched_tokens = 0
        self.loaded_tokens = 0
        self.output_tokens = 0
        self.wasted_prefill_s = 0.0
        self.num_wasted = 0
        self.ttft_s = Histogram()
        self.gap_s = Histogram()
        self.tbt_top10_mean_s = Histogram()
        self.prefill_compute_s = Histogram()
        self.stages_s: dict[str, float] = {}
        self.ttft_error_s = Histogram()
        self.ttft_bias_s = 0.0
        self._refused: dict[RequestId, tuple[int, str]] = {}
        self._prefill_s: dict[RequestId, float] = {}

    def note_prefill(self, request_id: RequestId, seconds: float) -> None:
        self._prefill_s[request_id] = self._prefill_s.get(request_id, 0.0) + seconds

    def note_refused(self, request_id: RequestId, status: int, reason: str) -> None:
        self._refused[request_id] = (status, reason)

    def note_ended(self, record: RequestRecord) -> None:
        """Takes the record apart; nothing of it is kept."""
        self.num_requests += 1
        prefill_s = self._prefill_s.pop(record.request_id, 0.0)
        status, reason = self._refused.pop(record.request_id, (0, ""))
        if record.outcome in COMPLETED:
            self._note_completed(record, prefill_s)
            return
        if prefill_s:
            self.wasted_prefill_s += prefill_s
            self.num_wasted += 1
        if status in (429, 503):
            self.rejected[reason] += 1
        else:
            self.num_failed += 1

    def _note_completed(self, record: RequestRecord, prefill_s: float) -> None:
        gap_runs = record.gap_runs
        record.forget_gaps()  # the longest are asked for twice
        self.num_completed += 1
        self.num_effective += record.effective
        self.input_tokens += record.num_prompt_tokens
        self.hit_tokens += record.cached_tokens
        self.fetched_tokens += record.fetched_tokens
        self.loaded_tokens += record.loaded_tokens
        self.output_tokens += record.num_generated_tokens
        self.prefill_compute_s.add(prefill_s)
        ttft_s = record.ttft_s
        assert ttft_s is not None
        self.ttft_s.add(ttft_s)
        if record.predicted_ttft_s is not None:
            error_s = record.predicted_ttft_s - ttft_s
            self.ttft_error_s.add(abs(error_s))
            self.ttft_bias_s += error_s
        for gap_s, number in gap_runs:
            self.gap_s.add(max(gap_s, 0.0), number)
        top_s = record.tbt_top10_mean_s
        if top_s is not None:
            self.tbt_top10_mean_s.add(max(top_s, 0.0))
        for stage, seconds in record.stages_s().items():
            self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
