"""Predicted times of a step with drafts."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.cost.model import Chunk, CostModel
from moonpool.scheduler.batching.policies import Share
from moonpool.scheduler.request_state import RequestState


class StepTimes:
    """Times of one step with any number of drafts. A draft costs a decode's row."""

    def __init__(
        self,
        cost: CostModel,
        step: Sequence[Share[RequestState]],
        decodes: Sequence[RequestState],
    ) -> None:
        self._cost = cost
        self._chunks = [
            Chunk(number, request.num_scheduled, request.num_reused, False)
            for request, number in step
            if not request.decoding
        ]
        self._batch = len(decodes)
        self._context_tokens = sum(request.tokens.size for request in decodes)
        self._base_s = self.seconds(0)
        # A right draft saves its request a row of a later step.
        self.saved_s = cost.decode_step_s(self._batch, self._context_tokens) / self._batch

    def seconds(self, num_drafts: int) -> float:
        """The step's time with this many drafts."""
        batch = self._batch + num_drafts
        return self._cost.step_s(self._chunks, batch, self._context_tokens)

    def rate(self, num_drafts: int, gained_tokens: float, drafting_s: float = 0.0) -> float:
        """How many times the work per second of a step without drafts this one does, if they bring
        `gained_tokens` and a draft model takes `drafting_s`."""
        seconds = self.seconds(num_drafts) + drafting_s
        return (self._base_s + gained_tokens * self.saved_s) / seconds if seconds else 1.0


class DraftingTimes:
    """The time of a draft model, as guesses are added one by one. It guesses in rounds: each round
    is a step of its own, and adds one token to every request that wants another."""

    def __init__(self, cost: CostModel | None) -> None:
        self.seconds = 0.0
        self._cost = cost
        self._rows: list[int] = []
        self._context_tokens: list[int] = []
        self._round_s: list[float] = []

    def add(self, request: RequestState, number: int, num_lacking: int) -> None:
        """Adds the request's guess `number`, counted from 0. Before its first, the draft model
        computes `num_lacking` tokens."""
        assert self._cost is not None
        if number == len(self._rows):
            self._rows.append(0)
            self._context_tokens.append(0)
            self._round_s.append(0.0)
        self._rows[number] += 1 if number else num_lacking
        self._context_tokens[number] += request.tokens.size
        rows, context_tokens = self._rows[number], self._context_tokens[number]
        round_s = self._cost.decode_step_s(rows, context_tokens)
        self.seconds += round_s - self._round_s[number]
        self._round_s[number] = round_s
