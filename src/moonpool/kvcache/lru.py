"""Least recently used: the block let go longest ago goes first, a prompt's last blocks before its
first ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moonpool.types import BlockId, BlockKey


class LruEviction:
    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        """Nothing to learn: only the moment of release counts."""

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to learn here either."""

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        order = self._order
        num_before = len(order)
        for block_id in reversed(block_ids):
            order[block_id] = None
        assert len(order) == num_before + len(block_ids), "a block became evictable twice"

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def pop(self, num_blocks: int) -> list[BlockId]:
        popitem = self._order.popitem
        return [popitem(last=False)[0] for _ in range(num_blocks)]

    def evict(self, block_id: BlockId) -> bool:
        del self._order[block_id]
        return True

    def forget(self, block_id: BlockId) -> None:
        self._order.pop(block_id, None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order
