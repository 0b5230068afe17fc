"""Keeps vLLM's blocks that have left a window and have not been stored yet.

vLLM gives such blocks to other requests in its next step. A reader of such blocks must count as one
of their users: vLLM's own connectors do the same with its block pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Place = tuple[int, int]
"""The group of KVCache, and the index of a block in its request."""


class HeldBlocks:
    """`block_pool` is vLLM's; `windows`: for each group the number of blocks of its window, or 0
    without one. Blocks are held for a request, then for a store, until all ranks have ended
    that."""

    def __init__(self, block_pool: Any, windows: Sequence[int]) -> None:
        self._pool = block_pool
        self._groups = [group for group, window in enumerate(windows) if window]
        self._of_request: dict[str, dict[Place, int]] = {}
        self._next: dict[str, int] = {}
        self._of_store: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are held now."""
        of_requests = sum(map(len, self._of_request.values()))
        return of_requests + sum(map(len, self._of_store.values()))

    def next_block(self, req_id: str, first: int) -> int:
        """The first block from `first` on that the request does not hold yet."""
        return max(self._next.get(req_id, 0), first)

    def hold(self, req_id: str, first: int, end: int, table: Sequence[Sequence[int]]) -> None:
        """Holds the request's blocks up to `end`, as far as they are in `table`."""
        start = self.next_block(req_id, first)
        found = {
            (group, index): table[group][index]
            for group in self._groups
            for index in range(start, min(end, len(table[group])))
            if table[group][index] > 0
        }
        self._next[req_id] = end
        self._pool.touch([self._pool.blocks[block] for block in found.values()])
        self._of_request.setdefault(req_id, {}).update(found)

    def take(self, req_id: str, first: int, end: int, number: int) -> dict[Place, int]:
        """Returns the held blocks from `first` to `end`, which the store `number` holds now."""
        mine = self._of_request.get(req_id, {})
        taken = {place: block for place, block in mine.items() if first <= place[1] < end}
        for place in taken:
            del mine[place]
        self._of_store[number] = list(taken.values())
        return taken

    def end_store(self, number: int) -> None:
        """Notes that the store has ended; ignored if it held nothing."""
        self._free(self._of_store.pop(number, []))

    def give_back(self, req_id: str) -> None:
        """Gives all blocks back, because the request has ended or lost them."""
        self._next.pop(req_id, None)
        self._free(list(self._of_request.pop(req_id, {}).values()))

    def _free(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])
