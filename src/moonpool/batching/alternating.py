"""Chunks and decodes in turns, never in one step: chunking without hybrid batches, a baseline."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.batching.chunked import plan_chunked
from moonpool.batching.plan import BatchPlan, Candidate


class AlternatingPlanner:
    """Remembers whose turn it is; an empty turn goes to the other side (Sarathi-Serve's ablation
    calls this chunked prefills only)."""

    def __init__(self) -> None:
        self._prefill_next = True

    def __call__(
        self,
        decodes: Iterable[Candidate],
        prefills: Iterable[Candidate],
        token_budget: int,
        max_sequences: int,
    ) -> BatchPlan:
        turns = {
            True: plan_chunked((), prefills, token_budget, max_sequences),
            # Decodes are not cut by the budget: no chunk shares their step.
            False: plan_chunked(decodes, (), max_sequences, max_sequences),
        }
        turn = self._prefill_next if turns[self._prefill_next] else not self._prefill_next
        self._prefill_next = not turn
        return turns[turn]
