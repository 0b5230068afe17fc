"""Evictable blocks by rank: the lowest rank goes first, and within one rank the oldest.

Knows no policy; one queue per rank in use, and a heap of those ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from moonpool.types import BlockId

Rank = tuple[int, int]


class RankedBlocks:
    def __init__(self) -> None:
        self._queues: dict[Rank, OrderedDict[BlockId, None]] = {}
        self._ranks: list[Rank] = []  # a heap of the keys of `_queues`
        self._rank_of: dict[BlockId, Rank] = {}

    def add(self, block_id: BlockId, rank: Rank) -> None:
        assert block_id not in self._rank_of, "a block became evictable twice"
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            heappush(self._ranks, rank)
        queue[block_id] = None
        self._rank_of[block_id] = rank

    def remove(self, block_id: BlockId) -> None:
        # An empty queue stays for a while: it is likely to be needed again.
        del self._queues[self._rank_of.pop(block_id)][block_id]
        if len(self._queues) > 2 * len(self._rank_of) + 64:
            self._queues = {rank: queue for rank, queue in self._queues.items() if queue}
            self._ranks = sorted(self._queues)

    def pop(self) -> BlockId:
        """Raises KeyError if there is none."""
        while self._ranks:
            queue = self._queues[self._ranks[0]]
            if queue:
                block_id, _ = queue.popitem(last=False)
                del self._rank_of[block_id]
                return block_id
            del self._queues[heappop(self._ranks)]
        raise KeyError("no block is evictable")

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._rank_of
