"""Hit ratios of prompts: by policy, at the optimum, and divided over several caches."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from moonpool.sim.capacity import HitRatios, PromptBlocks, PromptCache
from moonpool.types import BlockKey

Routing = Literal["first", "least-loaded", "round-robin"]
"""The rule that chooses the cache of a prompt: the longest match, with ties to the first cache or
to the cache that computed least, or round-robin."""


def hit_ratios(
    prompts: Iterable[PromptBlocks],
    policy: str,
    capacity_blocks: int | None,
    block_tokens: int = 512,
) -> HitRatios:
    """Serves all prompts by one cache with this eviction policy, in blocks of `block_tokens`."""
    cache = PromptCache(policy, capacity_blocks, block_tokens)
    for prompt in prompts:
        cache.serve(prompt)
    return cache.ratios()


def belady_hit_ratio(prompts: Iterable[PromptBlocks], capacity_blocks: int) -> float:
    """Returns the best hit ratio of policies that store every block: they evict the block with the
    farthest next use.

    Counts blocks, whether or not their predecessors are cached.
    """
    touches = [key for prompt in prompts for key in prompt.keys]
    never = len(touches)
    next_use = [never] * never
    seen: dict[BlockKey, int] = {}
    for place in range(never - 1, -1, -1):
        next_use[place] = seen.get(touches[place], never)
        seen[touches[place]] = place
    due: dict[BlockKey, int] = {}  # next use of each cached block
    farthest: list[tuple[int, BlockKey]] = []
    num_hits = 0
    for key, next_place in zip(touches, next_use, strict=True):
        if key in due:
            num_hits += 1
        elif len(due) >= capacity_blocks:
            while True:
                place, victim = heappop(farthest)
                if due.get(victim) == -place:
                    break
            del due[victim]
        due[key] = next_place
        heappush(farthest, (-next_place, key))
    return num_hits / max(1, never)


class SplitRatios(NamedTuple):
    """Hits of several caches together, and their imbalance.

    `imbalance` is the largest number of computed tokens of a cache over the mean: from 1 (balanced)
    to the number of caches (one computes everything).
    """

    ratios: HitRatios
    imbalance: float


def split_hit_ratios(
    prompts: Iterable[PromptBlocks],
    num_caches: int,
    capacity_blocks: int,
    routing: Routing,
    ignored_blocks: int = 0,
    block_tokens: int = 512,
) -> SplitRatios:
    """Routes each prompt to one of `num_caches` independent caches of `capacity_blocks`.

    A match of at most `ignored_blocks` counts as no match, because all prompts may share a system
    prompt.
    """
    caches = [PromptCache("lru", capacity_blocks, block_tokens) for _ in range(num_caches)]
    computed_tokens = [0] * num_caches
    for number, prompt in enumerate(prompts):
        if routing == "round-robin":
            chosen = number % num_caches
        else:
            matches = [cache.num_cached(prompt) for cache in caches]
            longest = max(matches)
            if longest <= ignored_blocks:
                tied = list(range(num_caches))
            else:
                tied = [i for i, match in enumerate(matches) if match == longest]
            loads = computed_tokens
            chosen = tied[0] if routing == "first" else min(tied, key=lambda i: loads[i])
        computed_tokens[chosen] += prompt.num_tokens - caches[chosen].serve(prompt)
    columns = zip(*(cache.ratios() for cache in caches), strict=True)
    total = sum(computed_tokens)
    imbalance = max(computed_tokens) * num_caches / total if total else 1.0
    return SplitRatios(HitRatios(*(sum(column) for column in columns)), imbalance)
