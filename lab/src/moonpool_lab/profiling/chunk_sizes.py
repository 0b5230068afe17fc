"""Recommends chunk sizes for a measured machine: by saturation, and by the TBT SLO with decodes.

SARATHI section 4.3 profiles chunk sizes for their tiles and their saturation; Sarathi-Serve section
4.3 takes the largest budget whose step meets the SLO. Instances compute this budget for every step
(`scheduler.batching.chunk_budget`); this module computes it in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from moonpool.cost.fitted import ChunkChoice, FittedCost, Profile
from moonpool.cost.model import CHUNKED_STEP_SHARE, Chunk
from moonpool.scheduler.batching.chunk_budget import token_budget

SATURATED = 0.95  # share of the highest throughput that counts as saturated


def recommend(
    cost: FittedCost,
    curve: Mapping[int, float],
    slos_s: Iterable[float],
    decodes: int,
    context_tokens: int,
) -> Profile:
    """Returns the profile. `curve` gives the seconds of a step by the size of its only chunk, and
    must not be empty."""
    saturated = saturation_tokens(curve, cost.tile_tokens)
    most = max(curve)
    chunks = tuple(_choose(cost, tbt_s, decodes, context_tokens, most) for tbt_s in slos_s)
    return Profile(
        **msgspec.structs.asdict(cost),
        step_s_by_tokens=dict(curve),
        saturation_tokens=saturated,
        chunks=chunks,
    )


def _choose(
    cost: FittedCost, tbt_s: float, decodes: int, context_tokens: int, most_tokens: int
) -> ChunkChoice:
    def step_s(num_tokens: int) -> float:
        chunk = Chunk(num_tokens=num_tokens, start=0, cached_tokens=0, last=False)
        return cost.step_s((chunk,), decodes, decodes * context_tokens)

    limit_s = tbt_s * CHUNKED_STEP_SHARE
    budget = token_budget(step_s, decodes, limit_s, cost.tile_tokens, most_tokens + decodes)
    chunk_tokens = budget - decodes
    seconds = step_s(chunk_tokens)
    return ChunkChoice(
        tbt_s=tbt_s,
        decodes=decodes,
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        step_s=seconds,
        holds=seconds <= tbt_s,
    )


def saturation_tokens(curve: Mapping[int, float], tile_tokens: int = 1) -> int:
    """Returns the smallest measured chunk of whole tiles whose throughput is at least SATURATED of
    the highest (SARATHI section 4.3 and Fig. 4)."""
    rates = {tokens: tokens / seconds for tokens, seconds in curve.items()}
    aligned = {t: rate for t, rate in rates.items() if t % tile_tokens == 0} or rates
    highest = max(aligned.values())
    return min(tokens for tokens, rate in aligned.items() if rate >= SATURATED * highest)
