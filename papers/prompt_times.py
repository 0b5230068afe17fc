"""How long one prompt takes alone, in chunks: on an instance, and on a pipeline of stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moonpool.cost.model import Chunk, StepCost


def prompt_chunks(num_tokens: int, cached_tokens: int, chunk_tokens: int) -> tuple[Chunk, ...]:
    """Cuts a prompt into chunks of at most `chunk_tokens`. At least its last token is computed, for
    the logits."""
    start = min(cached_tokens, num_tokens - 1)
    assert start >= 0 and chunk_tokens >= 1
    return tuple(
        Chunk(
            num_tokens=min(chunk_tokens, num_tokens - at),
            start=at,
            cached_tokens=start,
            last=at + chunk_tokens >= num_tokens,
            prompt_tokens=num_tokens,
        )
        for at in range(start, num_tokens, chunk_tokens)
    )


def prompt_s(
    ground_truth: StepCost, num_tokens: int, cached_tokens: int, chunk_tokens: int
) -> float:
    """Time for which a prompt's chunks keep an instance, or each of its stages, busy."""
    chunks = prompt_chunks(num_tokens, cached_tokens, chunk_tokens)
    return fsum(ground_truth.step_s((chunk,), 0, 0) for chunk in chunks)


def pipeline_s(cost: StepCost, chunks: Sequence[Chunk]) -> float:
    """When the last of these chunks leaves the last stage of an otherwise idle pipeline.

    A chunk enters a stage when it has arrived from the previous stage and the previous chunk has
    left.
    """
    free_at = [0.0] * cost.num_stages
    for chunk in chunks:
        step_s, hop_s = cost.step_s((chunk,), 0, 0), cost.hop_s(chunk.num_tokens)
        at = 0.0
        for stage, free in enumerate(free_at):
            free_at[stage] = max(at, free) + step_s
            at = free_at[stage] + hop_s
    return free_at[-1]
