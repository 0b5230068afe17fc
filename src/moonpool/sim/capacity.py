"""Hit ratio by eviction policy and capacity: prompts one after the other, without time.

Every prompt passes through a real BlockPool by the calls of an instance: match, acquire, allocate,
seal, release. Prompts are streamed, so memory holds the pool only; Belady's optimum needs the whole
sequence. Of a prompt larger than the pool, the first blocks that fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.trace.blocks import prompt_keys
from moonpool.trace.row import TraceRow
from moonpool.types import BlockKey

Routing = Literal["first", "least-loaded", "round-robin"]
"""The cache of a prompt: the longest match with ties to the first cache or to the one that computed
least, or round-robin."""

UNBOUNDED_BLOCKS = 1 << 40
_OWNER = BlockOwner("work")
_REPORT_EVERY = 1024  # prompts; a pool queues its changes until they are taken


class PromptBlocks(NamedTuple):
    """The keys of a prompt's blocks, in order, and its length."""

    keys: Sequence[BlockKey]
    num_tokens: int


class HitRatios(NamedTuple):
    """Hits of a run. `any_hit_blocks` also counts blocks whose predecessor was not cached."""

    num_prompts: int
    num_blocks: int
    num_tokens: int
    hit_blocks: int
    any_hit_blocks: int
    hit_tokens: int

    @property
    def by_prefix(self) -> float:
        """The share of blocks found behind an unbroken cached prefix."""
        return self.hit_blocks / max(1, self.num_blocks)

    @property
    def by_block(self) -> float:
        """The share of blocks found, whether or not their prefix was cached."""
        return self.any_hit_blocks / max(1, self.num_blocks)

    @property
    def by_token(self) -> float:
        """The share of prompt tokens in an unbroken cached prefix."""
        return self.hit_tokens / max(1, self.num_tokens)


def prompts_of(
    rows: Iterable[TraceRow],
    trace_block_tokens: int,
    block_tokens: int,
    count_partial: bool = False,
) -> Iterator[PromptBlocks]:
    """The prompts of a trace in blocks of `block_tokens`.

    Counts full blocks only, as serving does, or with `count_partial` the last one too, as published
    tables do. Raises ValueError if the block sizes do not fit each other.
    """
    if count_partial and block_tokens > trace_block_tokens:
        raise ValueError(
            f"partial blocks can be counted in sizes up to the trace's own {trace_block_tokens}"
            f" tokens, not of {block_tokens}; count full blocks only"
        )
    for row in rows:
        num_tokens = row.input_tokens
        if count_partial:
            num_tokens = -(-num_tokens // block_tokens) * block_tokens
        keys = prompt_keys(row.hash_ids, num_tokens, trace_block_tokens, block_tokens)
        yield PromptBlocks(keys, row.input_tokens)


class PromptCache:
    """One cache of `capacity_blocks` (None: unbounded) and its hits so far."""

    def __init__(self, policy: str, capacity_blocks: int | None, block_tokens: int) -> None:
        num_blocks = UNBOUNDED_BLOCKS if capacity_blocks is None else capacity_blocks
        self.pool = BlockPool(num_blocks, make_eviction(policy, num_blocks))
        self._block_tokens = block_tokens
        self._num_prompts = self._num_blocks = self._num_tokens = 0
        self._hit_blocks = self._any_hit_blocks = self._hit_tokens = 0

    def num_cached(self, prompt: PromptBlocks) -> int:
        """The number of leading blocks of the prompt that are cached."""
        return len(self.pool.match(prompt.keys))

    def serve(self, prompt: PromptBlocks) -> int:
        """Serves a prompt and caches its blocks; returns the number of cached tokens it found."""
        pool, keys = self.pool, prompt.keys
        cached = pool.match(keys)
        pool.acquire(_OWNER, cached)
        num_hits = len(cached)
        new = pool.allocate(_OWNER, min(len(keys) - num_hits, pool.num_available))
        assert new is not None
        num_stored = 0
        for depth, block_id in enumerate(new, num_hits):
            num_stored += pool.cache_block(block_id, keys[depth], depth)
        pool.release(_OWNER)
        self._num_prompts += 1
        if self._num_prompts % _REPORT_EVERY == 0:
            pool.take_changes()
        hit_tokens = min(num_hits * self._block_tokens, prompt.num_tokens)
        self._num_blocks += len(keys)
        self._num_tokens += prompt.num_tokens
        self._hit_blocks += num_hits
        self._any_hit_blocks += num_hits + len(new) - num_stored
        self._hit_tokens += hit_tokens
        return hit_tokens

    def ratios(self) -> HitRatios:
        """The totals so far."""
        return HitRatios(
            self._num_prompts,
            self._num_blocks,
            self._num_tokens,
            self._hit_blocks,
            self._any_hit_blocks,
            self._hit_tokens,
        )


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
    """The optimum of policies that store every block: evict the block with the farthest next use.

    Counts blocks, whether or not their predecessors are cached.
    """
    touches = [key for prompt in prompts for key in prompt.keys]
    never = len(touches)
    next_use = [never] * never
    seen: dict[BlockKey, int] = {}
    for place in range(never - 1, -1, -1):
        next_use[place] = seen.get(touches[place], never)
        seen[touches[place]] = place
    due: dict[BlockKey, int] = {}  # next use of what is cached
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

    A match of at most `ignored_blocks` counts as none, since all prompts may share a system prompt.
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
