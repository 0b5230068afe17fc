"""Prefill-first batches of whole prompts, as vLLM ran them before chunked prefill: a baseline."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.batching.plan import BatchPlan, Candidate, PlanEntry


def plan_prefill_first(
    decodes: Iterable[Candidate],
    prefills: Iterable[Candidate],
    token_budget: int,
    max_sequences: int,
) -> BatchPlan:
    """Prompts whole, in their order, as many as the budget takes (the first one always runs);
    decodes only when no prompt waits, so that they stall meanwhile."""
    assert token_budget > 0 and max_sequences > 0
    entries: list[PlanEntry] = []
    tokens_left = token_budget
    for candidate in prefills:
        too_many = len(entries) == max_sequences or candidate.num_uncomputed > tokens_left
        if entries and too_many:
            break
        entries.append(PlanEntry(candidate.request_id, candidate.num_uncomputed))
        tokens_left -= candidate.num_uncomputed
    if not entries:
        entries = [PlanEntry(c.request_id, c.num_uncomputed) for c in decodes][:max_sequences]
    return BatchPlan(tuple(entries))
