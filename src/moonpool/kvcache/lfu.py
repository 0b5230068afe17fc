"""Least frequently used: the block with the fewest uses since it was stored goes first, the one let
go longest ago among equals. Counts die with the block."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvcache.ranked import RankedBlocks
from moonpool.types import BlockId, BlockKey


class LfuEviction:
    def __init__(self) -> None:
        self._num_uses: dict[BlockId, int] = {}
        self._blocks = RankedBlocks()

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        self._num_uses.update(dict.fromkeys(block_ids, 1))

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        num_uses = self._num_uses
        for block_id in block_ids:
            num_uses[block_id] += 1

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        for block_id in reversed(block_ids):
            self._blocks.add(block_id, (self._num_uses[block_id], 0))

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._blocks.remove(block_id)

    def pop(self, num_blocks: int) -> list[BlockId]:
        popped = [self._blocks.pop() for _ in range(num_blocks)]
        for block_id in popped:
            del self._num_uses[block_id]
        return popped

    def evict(self, block_id: BlockId) -> bool:
        self._blocks.remove(block_id)
        del self._num_uses[block_id]
        return True

    def forget(self, block_id: BlockId) -> None:
        if block_id in self._blocks:
            self._blocks.remove(block_id)
        del self._num_uses[block_id]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks
