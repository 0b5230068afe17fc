"""The prompt blocks of a trace: keys in the engine's block size, turns, and LRU hit ratios.

A trace names blocks by integers, and equal ids mean equal whole prefixes. The key of an engine's
block is such an id with a position inside the trace's block, so equal keys mean equal prefixes,
too. Keys of different engine block sizes, or of different traces, must not meet in one pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from moonpool.trace.row import TraceRow
from moonpool.types import BlockKey

_ID_BYTES = 8
_PRIVATE = b"\xff\xff\xff\xff"  # larger than any position in a block, and therefore unique


def prompt_keys(
    hash_ids: Sequence[int], input_tokens: int, trace_block_tokens: int, block_tokens: int
) -> tuple[BlockKey, ...]:
    """Keys of the prompt's full blocks of `block_tokens`; none without hashes (see `private_keys`).

    A smaller engine block splits a block of the trace, also a partial last one. A larger one takes
    its key from the last block of the trace in it. Raises ValueError if neither block size divides
    the other.
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
            f"blocks of {block_tokens} tokens do not fit those of the trace, {trace_block_tokens}"
            " tokens: one must be a multiple of the other; set pool.block_tokens to"
            f" {_nearest_divisor(trace_block_tokens, block_tokens)}"
        )
    assert len(found) == num_full, "fewer hash ids than the prompt has blocks"
    return cast("tuple[BlockKey, ...]", tuple(found))


def private_keys(number: int, input_tokens: int, block_tokens: int) -> tuple[BlockKey, ...]:
    """Returns the keys of the `number`-th prompt of a trace without hashes; no other prompt has
    these keys."""
    name = number.to_bytes(_ID_BYTES, "little")
    num_full = input_tokens // block_tokens
    return tuple(BlockKey(name + i.to_bytes(4, "little") + _PRIVATE) for i in range(num_full))


@lru_cache(maxsize=64)
def _places(count: int) -> tuple[bytes, ...]:
    return tuple(place.to_bytes(_ID_BYTES, "little") for place in range(count))


def _nearest_divisor(whole: int, wanted: int) -> int:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


MIN_FOLLOW_UP_BLOCKS = 2
"""Leading blocks that a row must share with an earlier one to count as its next turn. The first
block is often a system prompt that all requests share."""


class Turn:
    """One row of a session: its length, the leading blocks that the session has seen, and its
    number."""

    __slots__ = ("arrived_s", "hit_blocks", "index", "input_tokens", "output_tokens")

    def __init__(self, row: TraceRow, hit_blocks: int, index: int) -> None:
        self.arrived_s = row.arrived_s
        self.input_tokens = row.input_tokens
        self.output_tokens = row.output_tokens
        self.hit_blocks = hit_blocks
        self.index = index  # number of the turn; the first turn has 1


class TurnTracker:
    """Assigns each row, in order of time, to the turn that it continues.

    A row continues the last row that used the last of its known leading blocks. Memory holds one
    entry per distinct block.
    """

    def __init__(self, min_blocks: int = MIN_FOLLOW_UP_BLOCKS) -> None:
        self._last_user: dict[int, Turn] = {}
        self._min_blocks = min_blocks

    def last_use_s(self, block: int, now_s: float) -> float:
        """Seconds since the last row with this block arrived; 0 if this is the first one."""
        user = self._last_user.get(block)
        return now_s - user.arrived_s if user is not None else 0.0

    def add(self, row: TraceRow) -> tuple[Turn, Turn | None]:
        """Returns the turn of the row and the previous turn of its session, if any."""
        users = self._last_user
        hit_blocks = 0
        previous: Turn | None = None
        for block in row.hash_ids:
            user = users.get(block)
            if user is None:
                break
            previous = user
            hit_blocks += 1
        if hit_blocks < self._min_blocks:
            previous = None
        turn = Turn(row, hit_blocks, previous.index + 1 if previous else 1)
        for block in row.hash_ids:
            users[block] = turn
        return turn, previous


class LruCurve:
    """Hit ratio of an LRU cache of prompt blocks, for several capacities in one pass.

    The method of published tables: rows in order, without time. A row touches its blocks from first
    to last, and a block is a hit only if all blocks before it are. A miss inserts the block and
    evicts the least recently used one.
    """

    def __init__(self, capacities_blocks: Sequence[int]) -> None:
        self._caches = [(capacity, OrderedDict[int, None]()) for capacity in capacities_blocks]
        self._hits = [0] * len(self._caches)
        self._num_blocks = 0

    def add(self, row: TraceRow) -> None:
        """Passes the next row through all caches."""
        self._num_blocks += len(row.hash_ids)
        for number, (capacity, cache) in enumerate(self._caches):
            in_prefix = True
            for block in row.hash_ids:
                if block in cache:
                    cache.move_to_end(block)
                    self._hits[number] += in_prefix
                else:
                    in_prefix = False
                    if len(cache) >= capacity:
                        cache.popitem(last=False)
                    cache[block] = None

    def ratios(self) -> dict[int, float]:
        """Hit blocks over all blocks, by capacity; 0 without blocks."""
        total = max(1, self._num_blocks)
        return {
            capacity: hits / total
            for (capacity, _), hits in zip(self._caches, self._hits, strict=True)
        }
