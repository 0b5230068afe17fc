"""The timestamps of one request, from which all its metrics are derived.

    arrived -> placed -> prefill_started -> prefill_done -> transfer_done -> decode_started
            -> first_token -> finished                    (or refused, failed, aborted)

Live serving and the simulator fill the same record; metrics, `/explain` and reports read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.types import InstanceId, RequestId, Slo, TraceContext

STAGES = (
    ("placement", "arrived", "placed"),
    ("queue_and_fetch", "placed", "prefill_started"),
    ("prefill", "prefill_started", "prefill_done"),
    ("handover", "prefill_done", "first_token"),
    ("decode", "first_token", "finished"),
)
"""The stages of a request, as (name, begin, end). The stages are consecutive, so they add up to the
request's whole time. The KVCache transfer overlaps prefill and handover; its end is
`transfer_done_s`."""


MAX_SPANS = 256
"""Most parts of a traced request that its record keeps; a long prompt has many chunks."""


class RecordedSpan(NamedTuple):
    """A part of a traced request on one instance, between two instants of the driver's clock."""

    name: str
    instance_id: str
    begin_s: float
    end_s: float
    num_tokens: int
    num_bytes: int


@dataclass(slots=True)
class RequestRecord:
    """Instants are seconds on the driver's clock, or None if the event has not happened."""

    request_id: RequestId
    num_prompt_tokens: int
    slo: Slo
    arrived_s: float
    placed_s: float | None = None
    prefill_started_s: float | None = None
    prefill_done_s: float | None = None
    transfer_done_s: float | None = None
    decode_started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    outcome: str = ""  # "stop", "length" or "abort", or the reason of a rejection
    attempts: int = 0
    prefill_instance: InstanceId | None = None
    decode_instance: InstanceId | None = None
    predicted_ttft_s: float | None = None  # TTFT predicted at the placement
    expected_ttft_s: float | None = None  # TTFT predicted from the arrival on, like `ttft_s`
    predicted_tbt_s: float | None = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    loaded_tokens: int = 0  # tokens loaded from the prefill instance's SSD
    corrupt_slices: int = 0  # slices with a wrong checksum, of the prefix or the KVCache
    uses_cache: bool = True
    is_counted: bool = False  # whether the prompt and first token are in the metrics
    tokens_before: int = 0  # tokens of the answer that its client has from an earlier head
    # tokens generated since then; tokens after the end of the answer do not count
    num_generated_tokens: int = 0
    num_surplus_tokens: int = 0  # tokens that were generated after the end of the answer
    prefills_took_s: float = 0.0  # prefill time of all attempts, from their first chunk to the end
    wasted_prefills_took_s: float = 0.0  # prefill time of attempts that led to no whole answer
    num_wasted_prefills: int = 0
    gap_runs: list[tuple[float, int]] = field(default_factory=list)  # (seconds, count)
    shared_steps: int = 0  # steps that also computed a prompt, or whose duration is unknown
    explanation: tuple[str, ...] = ()
    projection: dict[str, float] | None = None  # the numbers behind a rejection, by name
    tenant: str = ""
    program: str = ""  # id of the program that the request is a call of
    parent_program: str = ""  # id of the program that started that program as a sub-agent
    max_tokens: int = 0
    kept_tbt_top10_mean_s: float | None = None
    trace: TraceContext | None = None
    spans: list[RecordedSpan] = field(default_factory=list)  # only recorded for a traced request
    num_lost_spans: int = 0

    @property
    def ttft_s(self) -> float | None:
        """None until the first token, and if an earlier head delivered the first token."""
        if self.first_token_s is None or self.tokens_before:
            return None
        return self.first_token_s - self.arrived_s

    @property
    def answer_tokens(self) -> int:
        """Returns the length of the answer so far."""
        return self.tokens_before + self.num_generated_tokens

    @property
    def placed_ttft_s(self) -> float | None:
        """Time from the placement, for which the TTFT was predicted, to the first token."""
        if self.first_token_s is None or self.placed_s is None or self.tokens_before:
            return None
        return self.first_token_s - self.placed_s

    @property
    def tpot_s(self) -> float | None:
        """Returns the mean time per output token after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_generated_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_generated_tokens - 1)

    @property
    def tbt_top10_mean_s(self) -> float | None:
        """Mean of the longest tenth of the gaps between tokens: the paper's TBT of a request."""
        if not self.gap_runs:
            return self.kept_tbt_top10_mean_s
        count = left = max(1, sum([number for _, number in self.gap_runs]) // 10)
        total_s = 0.0
        for gap_s, number in sorted(self.gap_runs, reverse=True):
            taken = min(number, left)
            total_s += taken * gap_s
            left -= taken
            if not left:
                break
        return total_s / count

    @property
    def gaps_s(self) -> list[float]:
        """Returns all gaps between tokens."""
        return [gap_s for gap_s, number in self.gap_runs for _ in range(number)]

    def forget_gaps(self) -> None:
        """Keeps only the figure derived from the gaps: records may be kept for long."""
        self.kept_tbt_top10_mean_s = self.tbt_top10_mean_s
        self.gap_runs = []

    @property
    def effective(self) -> bool:
        """Completed within both SLOs (FAST'25 section 5). If an earlier head delivered the first
        token, the TTFT is unknown and the TBT decides."""
        if self.outcome not in ("stop", "length") or self.first_token_s is None:
            return False
        ttft_s, tbt_s = self.ttft_s or 0.0, self.tbt_top10_mean_s or 0.0
        return ttft_s <= self.slo.ttft_s and tbt_s <= self.slo.tbt_s

    def note_span(
        self,
        name: str,
        instance_id: InstanceId,
        now: float,
        seconds: float,
        num_tokens: int,
        num_bytes: int,
    ) -> None:
        """Keeps a part of a traced request, which ends now, or counts it as lost."""
        if len(self.spans) < MAX_SPANS:
            begin_s = max(now - seconds, self.arrived_s)
            span = RecordedSpan(name, instance_id, begin_s, now, num_tokens, num_bytes)
            self.spans.append(span)
        else:
            self.num_lost_spans += 1

    def begin_attempt(self, now: float) -> None:
        """Notes that the request is placed, perhaps again. The stages before the first token are
        those of the attempt that brings it; earlier attempts count as placement."""
        if self.first_token_s is not None:
            return
        self.placed_s = now
        self.prefill_started_s = self.prefill_done_s = None
        self.transfer_done_s = self.decode_started_s = None
        self.cached_tokens = self.fetched_tokens = self.loaded_tokens = 0

    def end_prefill(self, now: float) -> None:
        """Notes that a prefill has succeeded."""
        if self.first_token_s is None:
            self.prefill_done_s = now

    def note_prefill(self, took_s: float, wasted: bool) -> None:
        """Notes that the attempt of a prefill that took this long has ended. `wasted`: whether the
        prefill led to no whole answer."""
        self.prefills_took_s += took_s
        if wasted:
            self.wasted_prefills_took_s += took_s
            self.num_wasted_prefills += 1

    def note_embedding(self, now: float) -> None:
        """Notes that an embedding became visible in place of tokens."""
        self.first_token_s = self.last_token_s = now

    def note_tokens(
        self, count: int, now: float, gap_s: float = 0.0, longest_gap_s: float = 0.0
    ) -> None:
        """Adds `count` tokens that became visible `gap_s` apart, the last one at `now`.
        `gap_s` is 0 for a step that did not only decode, or, with a `longest_gap_s`, for several
        steps."""
        if count <= 0:
            return
        if longest_gap_s and not gap_s and self.last_token_s is not None:
            self._note_steps(count, now, longest_gap_s)
            return
        first_s = now - gap_s * (count - 1)
        if self.last_token_s is None:
            self.first_token_s = first_s
        else:
            self.gap_runs.append((first_s - self.last_token_s, 1))
            self.shared_steps += gap_s == 0.0
        if count > 1:
            self.gap_runs.append((gap_s, count - 1))
        self.last_token_s = now
        self.num_generated_tokens += count

    def _note_steps(self, count: int, now: float, longest_gap_s: float) -> None:
        """Adds tokens of several steps, of whose gaps the longest is known."""
        assert self.last_token_s is not None
        total_s = now - self.last_token_s
        longest_s = total_s if count == 1 else min(longest_gap_s, total_s)
        self.gap_runs.append((longest_s, 1))
        if count > 1:
            self.gap_runs.append(((total_s - longest_s) / (count - 1), count - 1))
        self.shared_steps += 1
        self.last_token_s = now
        self.num_generated_tokens += count

    def end_at(self, num_tokens: int) -> None:
        """Ends the answer after this number of tokens: later ones do not belong to it."""
        count = self.tokens_before + self.num_generated_tokens - num_tokens
        count = min(count, self.num_generated_tokens - 1)
        if count <= 0 or self.last_token_s is None:
            return
        self.num_generated_tokens -= count
        self.num_surplus_tokens += count
        while count:
            gap_s, number = self.gap_runs.pop()
            taken = min(number, count)
            self.last_token_s -= taken * gap_s
            count -= taken
            if taken < number:
                self.gap_runs.append((gap_s, number - taken))

    def stages_s(self) -> dict[str, float]:
        """Seconds spent in each stage that has both ends."""
        stages: dict[str, float] = {}
        for name, begin, end in STAGES:
            begin_s, end_s = getattr(self, begin + "_s"), getattr(self, end + "_s")
            if begin_s is not None and end_s is not None:
                stages[name] = max(end_s - begin_s, 0.0)
        return stages
