"""The spaces of all ranks of one model in a host's pool: a block is found if each has it. Pure.

A find runs in all spaces; the shortest prefix counts, and holds beyond it end. In a space with a
window, a prefix needs only its last blocks. So first the longest prefix is chosen that all spaces
can serve, and then each space is asked for its part of that prefix. A find that may wait is
repeated whenever blocks arrive, until all its keys are there or its time is over: so a decode
instance finds a prompt that a prefill instance is just about to store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.host_pool.block_space import BlocksFound, BlockSpace, Finder
from moonpool.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class GroupFound:
    """A find has ended: `block_ids` of each rank, for all blocks of the prefix, or for its last
    ones where the space has a window."""

    owner: Finder
    num_blocks: int
    num_loaded: int
    block_ids: tuple[tuple[BlockId, ...], ...]


@dataclass(slots=True)
class _Find:
    keys: Sequence[BlockKey]
    until_s: float
    num_tried: int = 0  # length of the prefix for which all spaces look now
    by_rank: dict[int, BlocksFound] = field(default_factory=dict)
    is_waiting: bool = False  # whether the find waits for blocks that other clients store


class BlockGroup:
    """The ranks of one model. After each call, the driver performs the actions of all spaces."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.spaces: dict[int, BlockSpace] = {}
        self.windows: dict[int, int] = {}
        """Windows in blocks, of the spaces that have one."""
        self._finds: dict[Finder, _Find] = {}
        self._ended: list[GroupFound] = []

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have a space."""
        return len(self.spaces) == self.num_ranks

    @property
    def first_whole_rank(self) -> int:
        """The first rank whose space has all blocks of a prefix; 0 if each has a window."""
        return next((rank for rank in range(self.num_ranks) if rank not in self.windows), 0)

    @property
    def num_finds(self) -> int:
        """Finds that have not ended."""
        return len(self._finds)

    def is_finding(self, owner: Finder) -> bool:
        """Whether the owner has a find that has not ended."""
        return owner in self._finds

    def take(self) -> list[GroupFound]:
        """Returns the finds that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def find(self, owner: Finder, keys: Sequence[BlockKey], until_s: float) -> None:
        """Looks for the longest prefix of `keys` that all spaces can serve, and waits for missing
        blocks until `until_s`. The search ends with `GroupFound`. A `find` replaces an earlier one
        of the same owner."""
        self.release(owner)
        if not self.is_whole:
            self._ended.append(GroupFound(owner, 0, 0, ()))
            return
        self._begin(owner, _Find(keys, until_s))

    def release(self, owner: Finder) -> None:
        """Ends a find, and its holds in all spaces."""
        self._finds.pop(owner, None)
        for space in self.spaces.values():
            space.release(owner)

    def part_of(self, rank: int, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Returns what the prefix `keys` needs in a rank's space."""
        window = self.windows.get(rank, 0)
        return keys[-window:] if window else keys

    def reached(self, rank: int, num_keys: int, num_here: int) -> int:
        """Returns how many blocks of a prefix of `num_keys` a rank can serve if the first
        `num_here` blocks of its part are there."""
        num_before = num_keys - min(self.windows.get(rank, 0) or num_keys, num_keys)
        complete = num_before + num_here == num_keys
        return num_keys if complete else 0 if num_before else num_here

    def on_found(self, rank: int, found: BlocksFound, now: float) -> None:
        """Notes that one space has ended its part of a find."""
        find = self._finds.get(found.owner)
        if find is None or find.is_waiting:
            return
        find.by_rank[rank] = found
        if len(find.by_rank) < self.num_ranks:
            return
        num_blocks = self._num_found(find)
        if num_blocks < find.num_tried and self.windows:
            # A block has gone in the meantime, and a shorter prefix needs other blocks.
            self._begin(found.owner, find, num_blocks)
            return
        if num_blocks < len(find.keys) and now < find.until_s:
            find.is_waiting = True  # the blocks that were found so far stay held
            return
        self._end(found.owner, find)

    def on_blocks(self) -> None:
        """Notes that blocks have arrived in a space, and searches again for the finds that wait."""
        for owner, find in list(self._finds.items()):
            if find.is_waiting:
                self._begin(owner, _Find(find.keys, find.until_s))

    def on_time(self, now: float) -> None:
        """Ends the searches whose time is over."""
        for owner, find in list(self._finds.items()):
            if find.is_waiting and now >= find.until_s:
                self._end(owner, find)

    def _begin(self, owner: Finder, find: _Find, most: int | None = None) -> None:
        """Looks for a prefix of at most `most` blocks."""
        self._finds[owner] = find
        keys = find.keys if most is None else find.keys[:most]
        find.num_tried = len(keys)
        if self.windows:
            present = {rank: space.present(keys) for rank, space in self.spaces.items()}
            find.num_tried = longest_prefix(present, self.windows)
        find.by_rank.clear()
        for rank, space in self.spaces.items():
            space.find(owner, self.part_of(rank, keys[: find.num_tried]))

    def _num_found(self, find: _Find) -> int:
        """Returns the length of the prefix that all spaces hold now. If a window has gaps, this is
        less than the longest possible prefix."""
        found = find.num_tried
        for rank, part in find.by_rank.items():
            count = len(part.block_ids)
            window = self.windows.get(rank, 0)
            if not window:
                found = min(found, count)
            elif count < min(window, find.num_tried):
                found = min(found, find.num_tried - 1)
        return found

    def _end(self, owner: Finder, find: _Find) -> None:
        del self._finds[owner]
        num_blocks = self._num_found(find)
        parts = [find.by_rank[number] for number in range(self.num_ranks)]
        blocks = []
        for rank, part in enumerate(parts):
            held = part.block_ids
            if rank not in self.windows:
                self.spaces[rank].shorten(owner, num_blocks, held)
                held = held[:num_blocks]
            blocks.append(held)
        num_loaded = min(max(part.num_loaded for part in parts), num_blocks)
        self._ended.append(GroupFound(owner, num_blocks, num_loaded, tuple(blocks)))


def longest_prefix(present: Mapping[int, Sequence[bool]], windows: Mapping[int, int]) -> int:
    """Returns the longest prefix of which each rank has the necessary blocks: all of them, or those
    in its window. `present`: whether each rank has each of the blocks."""
    lengths = [len(found) for found in present.values()]
    most = min(lengths, default=0)
    for rank, found in present.items():
        if rank not in windows:
            most = next((index for index in range(most) if not found[index]), most)
    runs = {rank: _runs(present[rank]) for rank in windows}
    for length in range(most, 0, -1):
        if all(runs[rank][length - 1] >= min(windows[rank], length) for rank in windows):
            return length
    return 0


def _runs(present: Sequence[bool]) -> list[int]:
    """How many blocks up to each one are there without a gap."""
    runs, run = [], 0
    for one in present:
        run = run + 1 if one else 0
        runs.append(run)
    return runs
