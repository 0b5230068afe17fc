"""Predicts how long answers decode, from the answers that have ended.

Enters the predicted ends in the forecast of the decode load. Books no load.
"""

from __future__ import annotations

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.estimators import OutputLengths
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import PlannedAttempt
from moonpool.conductor.state import Attempt, InstanceState, TrackedRequest
from moonpool.types import Request

OUTLIVED = 1.5
"""An answer that exceeds its predicted length is then predicted to reach this multiple of it."""


class OutputPredictor(ClusterObserver):
    """Predicts how long an answer decodes from the durations of earlier ones."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self.lengths = OutputLengths()
        self._cluster_state = cluster_state
        self._forecast = cluster_state.forecast

    def predict(self, tracked: TrackedRequest, num_shared: int) -> None:
        """Notes the predicted length of the answer in `tracked`. Does nothing here, because
        durations need no length; `LengthPredictor` does it. `num_shared`: how many of the prompt's
        first blocks are indexed."""

    def usual_tokens(self, request: Request) -> int:
        """Returns the length for which KVCache is booked: the length that the client expects, or
        else the mean. Clients set `max_tokens` far above the usual length."""
        program = request.program
        expected = 0 if program is None else program.expected_tokens
        return expected or int(self.lengths.mean.value)

    def placed(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        """Enters a request that will decode."""
        attempt, footprint = tracked.attempt, planned.footprint
        assert attempt is not None
        if not attempt.decodes:
            return
        lasts_s = self._decode_s(tracked, attempt)
        context_tokens = (footprint.num_tokens + footprint.expected_tokens) // 2
        begins_s = now + planned.placement.ttft_s
        attempt.interval = self._forecast.enter(begins_s, lasts_s, context_tokens, now)

    def decode_started(self, tracked: TrackedRequest, now: float) -> None:
        attempt = tracked.attempt
        assert attempt is not None
        if attempt.interval is not None:
            self._forecast.begin(attempt.interval, self._decode_s(tracked, attempt), now)

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        # an embedding does not count as an answer of one token
        if tracked.request.is_embedding:
            return
        self._learn_length(tracked)
        attempt = tracked.attempt
        if attempt is not None and attempt.decoding_since_s is not None and attempt.decodes:
            self._forecast.observe(now - attempt.decoding_since_s)

    def _learn_length(self, tracked: TrackedRequest) -> None:
        self.lengths.mean.add(tracked.record.answer_tokens)

    def _decode_s(self, tracked: TrackedRequest, attempt: Attempt) -> float:
        """Returns the predicted duration of this decode."""
        mean_s = self._forecast.mean_s
        return self.lengths.mean.value * attempt.tbt_s if mean_s is None else mean_s


class LengthPredictor(OutputPredictor):
    """Predicts by each answer's length."""

    def predict(self, tracked: TrackedRequest, num_shared: int) -> None:
        request, num_known = tracked.request, min(num_shared, len(tracked.keys))
        if request.program is not None and request.program.expected_tokens:
            expected = min(request.program.expected_tokens, request.sampling.max_tokens)
            tracked.predicted_output_tokens = float(expected)
        else:
            tracked.predicted_output_tokens = self.lengths.predict(
                request.num_prompt_tokens, tracked.keys, num_known
            )

    def tokens(self, tracked: TrackedRequest, now: float) -> None:
        """Prolongs the interval of an answer that is longer than predicted."""
        attempt, generated = tracked.attempt, len(tracked.generated)
        assert attempt is not None
        if not attempt.interval_tokens or generated < attempt.interval_tokens:
            return
        assert attempt.interval is not None
        attempt.interval_tokens = int(generated * OUTLIVED) + 1
        self._forecast.prolong(
            attempt.interval, (attempt.interval_tokens - generated) * attempt.tbt_s, now
        )

    def _learn_length(self, tracked: TrackedRequest) -> None:
        layout, num_prompt_tokens = self._cluster_state.layout, tracked.request.num_prompt_tokens
        assert layout is not None
        prompt_keys = tracked.keys[: num_prompt_tokens // layout.block_tokens]
        num_tokens, predicted = tracked.record.answer_tokens, tracked.predicted_output_tokens
        self.lengths.learn(num_prompt_tokens, prompt_keys, num_tokens, predicted)

    def _decode_s(self, tracked: TrackedRequest, attempt: Attempt) -> float:
        most = tracked.request.sampling.max_tokens
        attempt.interval_tokens = max(min(int(tracked.predicted_output_tokens), most), 1)
        return max(attempt.interval_tokens - len(tracked.generated), 1) * attempt.tbt_s
