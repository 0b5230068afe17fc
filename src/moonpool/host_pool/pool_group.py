"""The spaces of all ranks of one model in a host's pool: a block is found if each has it. Pure.

A find runs in all spaces; the shortest prefix counts, and holds beyond it end. A find that may wait
is repeated whenever blocks arrive, until all its keys are there or its time is over: so a decode
instance finds a prompt that a prefill instance is just about to store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.host_pool.block_space import BlocksFound, BlockSpace
from moonpool.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class GroupFound:
    """A find has ended: `block_ids` of each rank, as many for all."""

    owner: str
    num_blocks: int
    num_loaded: int
    block_ids: tuple[tuple[BlockId, ...], ...]


@dataclass(slots=True)
class _Find:
    keys: Sequence[BlockKey]
    until_s: float
    by_rank: dict[int, BlocksFound] = field(default_factory=dict)
    is_waiting: bool = False  # for blocks that others store


class BlockGroup:
    """The ranks of one model. After each call, the driver takes the actions of all spaces."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.spaces: dict[int, BlockSpace] = {}
        self._finds: dict[str, _Find] = {}
        self._ended: list[GroupFound] = []

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have a space."""
        return len(self.spaces) == self.num_ranks

    @property
    def num_finds(self) -> int:
        """Finds that have not ended."""
        return len(self._finds)

    def is_finding(self, owner: str) -> bool:
        """Whether the owner has a find that has not ended."""
        return owner in self._finds

    def take(self) -> list[GroupFound]:
        """Returns the finds that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def find(self, owner: str, keys: Sequence[BlockKey], until_s: float) -> None:
        """Ends with `GroupFound`. Another find of the same owner is given up."""
        self.release(owner)
        if not self.is_whole:
            self._ended.append(GroupFound(owner, 0, 0, ()))
            return
        self._begin(owner, _Find(keys, until_s))

    def release(self, owner: str) -> None:
        """Ends a find, and its holds in all spaces."""
        self._finds.pop(owner, None)
        for space in self.spaces.values():
            space.release(owner)

    def on_found(self, rank: int, found: BlocksFound, now: float) -> None:
        """One space has ended its part of a find."""
        find = self._finds.get(found.owner)
        if find is None or find.is_waiting:
            return
        find.by_rank[rank] = found
        if len(find.by_rank) < self.num_ranks:
            return
        parts = [find.by_rank[number] for number in range(self.num_ranks)]
        num_blocks = min(len(part.block_ids) for part in parts)
        if num_blocks < len(find.keys) and now < find.until_s:
            find.is_waiting = True  # what was found stays held
            return
        self._end(found.owner, find)

    def on_blocks(self) -> None:
        """Blocks have arrived in a space: looks again for those who wait."""
        for owner, find in list(self._finds.items()):
            if find.is_waiting:
                self._begin(owner, _Find(find.keys, find.until_s))

    def on_time(self, now: float) -> None:
        """Ends the finds whose time is over."""
        for owner, find in list(self._finds.items()):
            if find.is_waiting and now >= find.until_s:
                self._end(owner, find)

    def _begin(self, owner: str, find: _Find) -> None:
        self._finds[owner] = find
        for space in self.spaces.values():
            space.find(owner, find.keys)

    def _end(self, owner: str, find: _Find) -> None:
        del self._finds[owner]
        parts = [find.by_rank[number] for number in range(self.num_ranks)]
        num_blocks = min(len(part.block_ids) for part in parts)
        for rank, part in find.by_rank.items():
            self.spaces[rank].shorten(owner, num_blocks, part.block_ids)
        num_loaded = min(max(part.num_loaded for part in parts), num_blocks)
        blocks = tuple(part.block_ids[:num_blocks] for part in parts)
        self._ended.append(GroupFound(owner, num_blocks, num_loaded, blocks))
