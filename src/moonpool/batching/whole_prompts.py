"""Hybrid batches of whole prompts, as Orca's iteration-level scheduling makes them: a baseline."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.batching.plan import BatchPlan, Candidate, PlanEntry


def plan_whole_prompts(
    decodes: Iterable[Candidate],
    prefills: Iterable[Candidate],
    token_budget: int,
    max_sequences: int,
) -> BatchPlan:
    """All decodes, and beside them prompts whole, as many as the budget takes. The first one always
    runs, so a budget below any prompt gives one a step: Orca at its best, as SARATHI has it."""
    assert token_budget > 0 and max_sequences > 0
    entries = [PlanEntry(c.request_id, c.num_uncomputed) for c in decodes][:max_sequences]
    tokens_left = token_budget - len(entries)
    none_yet = True
    for candidate in prefills:
        too_long = candidate.num_uncomputed > tokens_left and not none_yet
        if len(entries) == max_sequences or too_long:
            break
        entries.append(PlanEntry(candidate.request_id, candidate.num_uncomputed))
        tokens_left -= candidate.num_uncomputed
        none_yet = False
    return BatchPlan(tuple(entries))
