"""Turns a trace's block hashes into block keys of the engine's own block size.

A trace names blocks by integers, equal ones for equal whole prefixes. A key is such an integer and
a place inside its block, so equal keys mean equal prefixes too. Keys of different engine block
sizes or of different traces must not meet in one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from moonpool.types import BlockKey

_ID_BYTES = 8
_PRIVATE = b"\xff\xff\xff\xff"  # no place inside a block is so large: these keys meet no other


def prompt_keys(
    hash_ids: Sequence[int], input_tokens: int, trace_block_tokens: int, block_tokens: int
) -> tuple[BlockKey, ...]:
    """Keys of the prompt's full blocks of `block_tokens`. Raises ValueError where neither block
    size divides the other.

    A smaller engine block splits the trace's (also the full parts of a partial last one); a larger
    one is named by the last trace block in it. Without hashes there are no keys (see
    `private_keys`).
    """
    num_full = input_tokens // block_tokens
    if not hash_ids:
        return ()
    if trace_block_tokens % block_tokens == 0:
        places = _places(trace_block_tokens // block_tokens)
        if len(places) == 1:
            place = places[0]
            found = [i.to_bytes(_ID_BYTES, "little") + place for i in hash_ids[:num_full]]
        else:
            names = [i.to_bytes(_ID_BYTES, "little") for i in hash_ids]
            found = [name + place for name in names for place in places]
            del found[num_full:]
    elif block_tokens % trace_block_tokens == 0:
        width = block_tokens // trace_block_tokens
        place = _places(1)[0]
        last = range(width - 1, num_full * width, width)
        found = [hash_ids[i].to_bytes(_ID_BYTES, "little") + place for i in last]
    else:
        raise ValueError(
            f"blocks of {block_tokens} tokens do not fit the trace's of {trace_block_tokens}:"
            " one must be a multiple of the other; set pool.block_tokens to"
            f" {_nearest_divisor(trace_block_tokens, block_tokens)}"
        )
    assert len(found) == num_full, "fewer hash ids than the prompt has blocks"
    return cast("tuple[BlockKey, ...]", tuple(found))


def private_keys(number: int, input_tokens: int, block_tokens: int) -> tuple[BlockKey, ...]:
    """Keys that no other `number`'s prompt shares: for a trace without hashes."""
    name = number.to_bytes(_ID_BYTES, "little")
    num_full = input_tokens // block_tokens
    return tuple(BlockKey(name + i.to_bytes(4, "little") + _PRIVATE) for i in range(num_full))


@lru_cache(maxsize=64)
def _places(count: int) -> tuple[bytes, ...]:
    return tuple(place.to_bytes(_ID_BYTES, "little") for place in range(count))


def _nearest_divisor(whole: int, wanted: int) -> int:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
