"""The times of one replica, as routers see them: until enough of them are known, they are assumed.

A prompt is a sample if nothing else ran on the replica while it was computed, and a step if no
prompt was.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.vllm.measure import FAR_BYTES_PER_S

ENOUGH = 6
"""Samples of each kind that the first fit needs. Further ones correct it by factors, as everywhere.
"""
MOST = 64
LEAST_TOKENS = 8
"""Tokens of an answer from which its mean step is a sample."""


@dataclass(slots=True)
class _Answer:
    num_prompt_tokens: int
    sent_s: float
    was_alone: bool
    cached_tokens: int = 0
    first_s: float | None = None
    num_tokens: int = 0


class ReplicaTimes:
    """`tokens_came` returns the fitted cost, once."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        self._prefills: list[PrefillSample] = []
        self._decodes: list[DecodeSample] = []
        self._is_fitted = False

    def began(self, call_id: str, num_tokens: int, now: float) -> None:
        """Notes that the call is sent."""
        for other in self._answers.values():
            other.was_alone = False
        alone = not self._answers
        self._answers[call_id] = _Answer(num_tokens, now, alone)

    def starts(self, call_id: str, cached_tokens: int) -> None:
        """Its prompt is computed now, but for these tokens."""
        if call_id in self._answers:
            self._answers[call_id].cached_tokens = cached_tokens

    def ended(self, call_id: str) -> None:
        self._answers.pop(call_id, None)

    def tokens_came(self, call_id: str, num_tokens: int, now: float) -> FittedCost | None:
        answer = self._answers.get(call_id)
        if answer is None or self._is_fitted:
            return None
        if answer.first_s is None:
            answer.first_s, answer.num_tokens = now, num_tokens
            if answer.was_alone and len(self._prefills) < MOST:
                self._prefills.append(
                    PrefillSample(
                        num_tokens=answer.num_prompt_tokens,
                        cached_tokens=min(answer.cached_tokens, answer.num_prompt_tokens - 1),
                        seconds=now - answer.sent_s,
                    )
                )
        else:
            answer.num_tokens += num_tokens
            self._note_steps(answer, now)
        return self._fit()

    def _note_steps(self, answer: _Answer, now: float) -> None:
        assert answer.first_s is not None
        is_sample = answer.num_tokens == LEAST_TOKENS and len(self._decodes) < MOST
        decoding = [each for each in self._answers.values() if each.first_s is not None]
        if not is_sample or len(decoding) < len(self._answers) or now <= answer.first_s:
            return
        context = sum(each.num_prompt_tokens + each.num_tokens for each in decoding)
        seconds = (now - answer.first_s) / (answer.num_tokens - 1)
        self._decodes.append(
            DecodeSample(batch=len(decoding), context_tokens=context, seconds=seconds)
        )

    def _fit(self) -> FittedCost | None:
        if min(len(self._prefills), len(self._decodes)) < ENOUGH:
            return None
        self._is_fitted = True
        return replace(
            fit_cost(self._prefills, self._decodes),
            shared_memory_bytes_per_s=FAR_BYTES_PER_S,
            network_bytes_per_s=FAR_BYTES_PER_S,
        )
