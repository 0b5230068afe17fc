"""Measures the hit ratio by eviction policy and capacity, with prompts one by one and no clock.

Every prompt passes through a real BlockPool by the calls of an instance: match, acquire, allocate,
seal, release. Prompts are streamed, so memory holds the pool only. If a prompt is larger than the
pool, the pool keeps the first blocks of the prompt that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.trace.blocks import prompt_keys
from moonpool.trace.row import TraceRow
from moonpool.types import BlockKey

UNBOUNDED_BLOCKS = 1 << 40
_OWNER = BlockOwner("work")
_REPORT_EVERY = 1024  # number of prompts; a pool queues its changes until a caller takes them


class PromptBlocks(NamedTuple):
    """The keys of a prompt's blocks, in order, and its length."""

    keys: Sequence[BlockKey]
    num_tokens: int


class HitRatios(NamedTuple):
    """The cache hits of a run. `any_hit_blocks` also counts blocks whose predecessor missed."""

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
    """Yields the prompts of a trace in blocks of `block_tokens`.

    Counts full blocks only, as serving does. With `count_partial`, also counts a partly filled last
    block, as published tables do. Raises ValueError if neither block size divides the other.
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
    """One cache of `capacity_blocks` (None means unbounded) and its hits so far."""

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
        """Returns the total hits so far."""
        return HitRatios(
            self._num_prompts,
            self._num_blocks,
            self._num_tokens,
            self._hit_blocks,
            self._any_hit_blocks,
            self._hit_tokens,
        )
