"""The hit ratio of one cache of prompt blocks by its capacity: LRU, prefix hits, blocks in order.

The method of the literature's tables: rows in order, no time; each row touches its blocks front to
back, a hit only while all before it were hits; a miss inserts, and pushes out the least recently
used block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moonpool.trace.row import TraceRow


class LruCurve:
    """Several capacities at once, so that a stream is read once. Holds one cache per capacity."""

    def __init__(self, capacities_blocks: Sequence[int]) -> None:
        self._caches = [(capacity, OrderedDict[int, None]()) for capacity in capacities_blocks]
        self._hits = [0] * len(self._caches)
        self._num_blocks = 0

    def add(self, row: TraceRow) -> None:
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
        """Hit blocks over all blocks, by capacity; 0 where no row had blocks."""
        total = max(1, self._num_blocks)
        return {
            capacity: hits / total
            for (capacity, _), hits in zip(self._caches, self._hits, strict=True)
        }
