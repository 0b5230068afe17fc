"""Which cached block goes first when room is needed. Sees only blocks that nobody holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from moonpool.types import BlockId


class Eviction(Protocol):
    """Order of the evictable blocks. Every method mutates, but `__len__` and `__contains__`."""

    def add(self, block_id: BlockId) -> None:
        """The block has just been released by its last holder."""
        ...

    def remove(self, block_id: BlockId) -> None:
        """The block is held again, or has lost its name."""
        ...

    def pop(self) -> BlockId:
        """Removes and returns the block to evict. Raises KeyError if there is none."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...


class LruEviction:
    """The least recently released block goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block_id: BlockId) -> None:
        assert block_id not in self._order
        self._order[block_id] = None

    def remove(self, block_id: BlockId) -> None:
        del self._order[block_id]

    def pop(self) -> BlockId:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order
