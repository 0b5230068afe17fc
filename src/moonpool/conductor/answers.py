"""How long answers decode: what the answers that ended have taught, and what it says of the next.

Owns the forecast of the decode load, because that is made of predicted ends. Books nothing and
chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.decode_forecast import DecodeForecast, Forecast
from moonpool.conductor.output_length import OutputLengths
from moonpool.conductor.state import Attempt, Tracked
from moonpool.conductor.survival_forecast import SurvivalForecast
from moonpool.types import BlockKey

FIRST_ANSWER_S = 10.0
"""How long an answer takes, as long as none has ended."""
OUTLIVED = 1.5
"""An answer that outlives its predicted length is taken to be so many times as long."""


class Answers:
    """Predicts by the distribution of durations seen, or (`by_length`) by each request's length."""

    def __init__(self, by_length: bool) -> None:
        self._by_length = by_length
        self.lengths = OutputLengths()
        self.forecast: Forecast = DecodeForecast() if by_length else SurvivalForecast()

    @property
    def usual_s(self) -> float:
        """How long an answer decodes."""
        return FIRST_ANSWER_S if self.forecast.usual_s is None else self.forecast.usual_s

    def predict(self, tracked: Tracked, num_shared: int) -> None:
        """Says how long the answer will be (mutates `tracked`); the first `num_shared` of its
        blocks were seen before."""
        if self._by_length:
            tracked.predicted_output_tokens = self.lengths.predict(
                tracked.request.num_prompt_tokens,
                tracked.keys,
                min(num_shared, len(tracked.keys)),
            )

    def enter(
        self, tracked: Tracked, attempt: Attempt, begins_s: float, context_tokens: int, now: float
    ) -> None:
        """A request that will decode from `begins_s` on (mutates `attempt`)."""
        lasts_s = self._decode_s(tracked, attempt)
        attempt.stay = self.forecast.enter(begins_s, lasts_s, context_tokens, now)

    def begin(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """Its first token is seen."""
        if attempt.stay is not None:
            self.forecast.begin(attempt.stay, self._decode_s(tracked, attempt), now)

    def note_tokens(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """An answer that is longer than was predicted stays longer."""
        generated = len(tracked.generated)
        if not attempt.stay_tokens or generated < attempt.stay_tokens:
            return
        assert attempt.stay is not None
        attempt.stay_tokens = int(generated * OUTLIVED) + 1
        self.forecast.prolong(attempt.stay, (attempt.stay_tokens - generated) * attempt.tbt_s, now)

    def learn(self, tracked: Tracked, prompt_keys: Sequence[BlockKey], now: float) -> None:
        """How long a complete answer was, in tokens and in time."""
        num_tokens = tracked.record.num_generated_tokens
        if not self._by_length:
            self.lengths.mean.add(num_tokens)
        else:
            predicted = tracked.predicted_output_tokens
            num_prompt_tokens = tracked.request.num_prompt_tokens
            self.lengths.learn(num_prompt_tokens, prompt_keys, num_tokens, predicted)
        attempt = tracked.attempt
        if attempt is not None and attempt.decoding_since_s is not None and attempt.answers:
            self.forecast.observe(now - attempt.decoding_since_s)

    def _decode_s(self, tracked: Tracked, attempt: Attempt) -> float:
        """How long this answer should decode."""
        if self._by_length:
            most = tracked.request.sampling.max_tokens
            attempt.stay_tokens = max(min(int(tracked.predicted_output_tokens), most), 1)
            return max(attempt.stay_tokens - len(tracked.generated), 1) * attempt.tbt_s
        usual_s = self.forecast.usual_s
        return self.lengths.mean.value * attempt.tbt_s if usual_s is None else usual_s
