"""Which prompts a layout is proven with, and in which of vLLM's blocks they are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool_engine.vllm.cache_layout import CacheGroup, LayoutRefused

PREFIX_UNITS = (3, 2)
"""Prefix of each prompt, in the tokens that the blocks of all groups divide."""
SPARE_TOKENS = 32
"""Places behind a prompt, for tokens that a drafter looks ahead."""

Places = tuple[tuple[int, ...], ...]
"""The blocks of a prompt for each group, in the order of its tokens."""


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """A prompt whose prefix ends with a block and whose tail does not."""

    name: str
    tokens: tuple[int, ...]
    prefix_tokens: int
    computed: Places
    """Blocks in which the prompt is computed from its beginning."""
    copied: Places
    """Blocks to which the prompt's prefix is copied. The blocks of all prompts are mixed, in random
    order."""

    def prefix_blocks(self, group: CacheGroup) -> int:
        return self.prefix_tokens // group.block_tokens

    def prefix_of(self, places: Places, groups: Sequence[CacheGroup]) -> Places:
        """Returns only the blocks of the prefix."""
        pairs = zip(places, groups, strict=True)
        return tuple(ids[: self.prefix_blocks(group)] for ids, group in pairs)

    def reversed_copy(self, groups: Sequence[CacheGroup]) -> Places:
        """Returns `copied` with the blocks of the prefix in reverse order."""
        found = []
        for ids, group in zip(self.copied, groups, strict=True):
            count = self.prefix_blocks(group)
            found.append((*ids[:count][::-1], *ids[count:]))
        return tuple(found)


def plan_prompts(
    groups: Sequence[CacheGroup],
    num_blocks: int,
    vocabulary: int,
    most_tokens: int,
    seed: int = 0,
) -> tuple[ProbePrompt, ...]:
    """Prompts of up to `most_tokens` tokens in different blocks of vLLM's `num_blocks`.

    Tokens are from the middle of the vocabulary: special ones are at its ends. Raises LayoutRefused
    if there is no room.
    """
    draw = random.Random(seed)
    unit = math.lcm(*(group.block_tokens for group in groups))
    lengths = _lengths(unit, most_tokens)
    counts = [
        [math.ceil((prefix + tail + SPARE_TOKENS) / g.block_tokens) for g in groups]
        for prefix, tail in lengths
    ]
    needed = sum(map(sum, counts))
    ids = list(range(1, num_blocks))  # vLLM's block 0 belongs to no request
    if 2 * needed > len(ids):
        raise LayoutRefused(f"a proof needs {2 * needed + 1} blocks, vLLM has {num_blocks}")
    low, high = ids[:needed], ids[-needed:]
    draw.shuffle(high)
    prompts = []
    for number, ((prefix, tail), wanted) in enumerate(zip(lengths, counts, strict=True)):
        tokens = (draw.randrange(vocabulary // 4, vocabulary // 2) for _ in range(prefix + tail))
        computed, copied = ([_take(side, n) for n in wanted] for side in (low, high))
        name = f"moonpool-probe-{number}"
        prompts.append(ProbePrompt(name, tuple(tokens), prefix, tuple(computed), tuple(copied)))
    return tuple(prompts)


def _lengths(unit: int, most_tokens: int) -> list[tuple[int, int]]:
    """Tokens of prefix and tail of each prompt."""
    tails = (max(2, unit // 2 + 1), 3)
    for fewer in (0, 1):
        found = [((n - fewer) * unit, tail) for n, tail in zip(PREFIX_UNITS, tails, strict=True)]
        if all(prefix + tail <= most_tokens for prefix, tail in found):
            return found
    raise LayoutRefused(
        f"a proof needs prompts of {found[0][0] + found[0][1]} tokens, vLLM takes {most_tokens}"
    )


def _take(ids: list[int], count: int) -> tuple[int, ...]:
    found = tuple(ids[:count])
    del ids[:count]
    return found
