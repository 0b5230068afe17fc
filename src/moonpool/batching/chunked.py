"""Chunked batches: all decodes, then prefill chunks, within a token budget (SARATHI section 3)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from moonpool.batching.plan import BatchPlan, Candidate, PlanEntry


def plan_chunked(
    decodes: Iterable[Candidate],
    prefills: Iterable[Candidate],
    token_budget: int,
    max_sequences: int,
) -> BatchPlan:
    """Decodes first, so that none stalls; what is left of the budget goes to prefills in their
    order.

    A prefill gets as much as fits, so several short prompts share a step and a long one is chunked.
    """
    assert token_budget > 0 and max_sequences > 0
    entries: list[PlanEntry] = []
    for candidate in islice(decodes, min(max_sequences, token_budget)):
        assert candidate.num_uncomputed == 1
        entries.append(PlanEntry(candidate.request_id, 1))
    tokens_left = token_budget - len(entries)
    for candidate in prefills:
        if len(entries) == max_sequences or not tokens_left:
            break
        num_tokens = min(candidate.num_uncomputed, tokens_left)
        entries.append(PlanEntry(candidate.request_id, num_tokens))
        tokens_left -= num_tokens
    return BatchPlan(tuple(entries))
