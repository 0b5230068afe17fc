"""Who was told that another keeps a block too: news for the instances, as the index changes.

Of several holders one *keeps* a block, and to the others it is spare. Each keeps as much as its
room is of theirs together, so that in all of them a block stays as long: where all might let go
first, those with most traffic for their room (a lone decode instance) would lose what others no
longer have. A prompt's blocks have one keeper as far as they have the same holders: a prefix is
matched as a whole on one instance.

Keeps nothing of blocks that only one instance has, and sends nothing itself. A word that is lost or
late makes an instance keep a copy too long, or, until the next word, let go of a last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from moonpool.types import BlockKey


class CopyNews(NamedTuple):
    """For one instance, of blocks in its DRAM."""

    spare: list[BlockKey]  # another keeps it from now on
    last: list[BlockKey]  # nobody else does


class Keepers:
    """Who keeps what several hold, block after block of each prompt. Holders are sets of bits."""

    def __init__(self, rooms: Mapping[int, int]) -> None:
        self._rooms = rooms
        self._holders = 0  # of the block before
        self._keeper = 0

    def of(self, key: BlockKey, holders: int) -> int:
        """One of the holders."""
        if holders != self._holders:
            both = holders & self._holders
            same_prompt = both == holders or both == self._holders
            if not (same_prompt and self._keeper & holders):
                self._keeper = self._drawn(key, list(bits_of(holders)))
            self._holders = holders
        return self._keeper

    def _drawn(self, key: BlockKey, holders: Sequence[int]) -> int:
        """Each as often as its room is of theirs; by a sum, since a trace's names are numbers."""
        left = crc32(key) / (1 << 32) * sum(self._rooms[bit] for bit in holders)
        for bit in holders:
            left -= self._rooms[bit]
            if left < 0:
                return bit
        return holders[-1]


def bits_of(several: int) -> Iterator[int]:
    while several:
        bit = several & -several
        several ^= bit
        yield bit


class Copies:
    """Instances are bits, as in the index."""

    def __init__(self) -> None:
        self._changed: dict[BlockKey, None] = {}
        self._told: dict[BlockKey, int] = {}  # who was told that a block is spare

    def note(self, keys: Iterable[BlockKey]) -> None:
        """These blocks' holders changed, and are or were more than one."""
        self._changed.update(dict.fromkeys(keys))

    def note_dropped(self, keys: Iterable[BlockKey], bit: int) -> None:
        """One of several holders lost them, and what it was told of them."""
        told_of = self._told
        for key in keys:
            self._changed[key] = None
            told = told_of.get(key, 0)
            if told & bit:
                told_of[key] = told ^ bit

    def note_all_dropped(self, key: BlockKey, bit: int) -> None:
        """As `note_dropped`, of a block that may never have been spare."""
        if self._told.get(key, 0) & bit:
            self.note_dropped((key,), bit)

    def take_news(
        self,
        holders: Mapping[BlockKey, int],
        demoted: Mapping[BlockKey, int],
        num_keys: int,
        rooms: Mapping[int, int],
    ) -> dict[int, CopyNews]:
        """By bit: what follows from the oldest changes, so many blocks of them (mutates). `rooms`:
        the blocks that each can hold."""
        keepers = Keepers(rooms)
        spare: defaultdict[int, list[BlockKey]] = defaultdict(list)
        last: defaultdict[int, list[BlockKey]] = defaultdict(list)
        changed, told_of = self._changed, self._told
        for key in list(islice(changed, num_keys)):
            del changed[key]
            here = holders.get(key, 0)
            if demoted:
                here &= ~demoted.get(key, 0)
            told = told_of.pop(key, 0)
            to_tell = here & ~keepers.of(key, here) if here & (here - 1) else 0
            if to_tell:
                told_of[key] = to_tell
            for bit in bits_of(to_tell & ~told):
                spare[bit].append(key)
            for bit in bits_of(told & here & ~to_tell):
                last[bit].append(key)
        return {bit: CopyNews(spare[bit], last[bit]) for bit in {*spare, *last}}
