"""Predicts how long answers decode, from the answers that have ended.

Owns the forecast of the decode load, which consists of predicted ends. Books nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.forecast.decode_forecast import Forecast, IntervalForecast, SurvivalForecast
from moonpool.conductor.forecast.estimators import OutputLengths
from moonpool.conductor.state import Attempt, TrackedRequest
from moonpool.types import BlockKey

FIRST_ANSWER_S = 10.0
"""Assumed duration of an answer until one has ended."""
OUTLIVED = 1.5
"""An answer that exceeds its predicted length is then predicted to reach this multiple of it."""


class OutputPredictor:
    """Predicts by the distribution of durations, or (`by_length`) by each answer's length."""

    def __init__(self, by_length: bool) -> None:
        self._by_length = by_length
        self.lengths = OutputLengths()
        self.forecast: Forecast = IntervalForecast() if by_length else SurvivalForecast()

    @property
    def mean_s(self) -> float:
        """Mean duration of a decode."""
        return FIRST_ANSWER_S if self.forecast.mean_s is None else self.forecast.mean_s

    def predict(self, tracked: TrackedRequest, num_shared: int) -> None:
        """Predicts the length of the answer. `num_shared`: how many of its
        first blocks are indexed."""
        if self._by_length:
            tracked.predicted_output_tokens = self.lengths.predict(
                tracked.request.num_prompt_tokens,
                tracked.keys,
                min(num_shared, len(tracked.keys)),
            )

    def enter(
        self,
        tracked: TrackedRequest,
        attempt: Attempt,
        begins_s: float,
        context_tokens: int,
        now: float,
    ) -> None:
        """Adds a request that will decode from `begins_s` on."""
        lasts_s = self._decode_s(tracked, attempt)
        attempt.interval = self.forecast.enter(begins_s, lasts_s, context_tokens, now)

    def begin(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """Notes that the answer's decode begins now."""
        if attempt.interval is not None:
            self.forecast.begin(attempt.interval, self._decode_s(tracked, attempt), now)

    def note_tokens(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """Prolongs the interval of an answer that is longer than predicted."""
        generated = len(tracked.generated)
        if not attempt.interval_tokens or generated < attempt.interval_tokens:
            return
        assert attempt.interval is not None
        attempt.interval_tokens = int(generated * OUTLIVED) + 1
        self.forecast.prolong(
            attempt.interval, (attempt.interval_tokens - generated) * attempt.tbt_s, now
        )

    def learn(self, tracked: TrackedRequest, prompt_keys: Sequence[BlockKey], now: float) -> None:
        """Learns from a complete answer: its length and its duration."""
        num_tokens = tracked.record.answer_tokens
        if not self._by_length:
            self.lengths.mean.add(num_tokens)
        else:
            predicted = tracked.predicted_output_tokens
            num_prompt_tokens = tracked.request.num_prompt_tokens
            self.lengths.learn(num_prompt_tokens, prompt_keys, num_tokens, predicted)
        attempt = tracked.attempt
        if attempt is not None and attempt.decoding_since_s is not None and attempt.decodes:
            self.forecast.observe(now - attempt.decoding_since_s)

    def _decode_s(self, tracked: TrackedRequest, attempt: Attempt) -> float:
        """Predicted duration of this decode."""
        if self._by_length:
            most = tracked.request.sampling.max_tokens
            attempt.interval_tokens = max(min(int(tracked.predicted_output_tokens), most), 1)
            return max(attempt.interval_tokens - len(tracked.generated), 1) * attempt.tbt_s
        mean_s = self.forecast.mean_s
        return self.lengths.mean.value * attempt.tbt_s if mean_s is None else mean_s
