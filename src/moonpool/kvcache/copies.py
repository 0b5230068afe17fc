"""Who was told that others have a block too: news for the instances, as the index changes.

Keeps nothing of blocks that only one instance has, and sends nothing itself. A word that is lost or
late makes an instance keep a copy too long, or, until the next word, let go of a last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from moonpool.types import BlockKey


class CopyNews(NamedTuple):
    """For one instance, of blocks in its DRAM."""

    spare: list[BlockKey]  # others have it too from now on
    last: list[BlockKey]  # nobody else has


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
        self, holders: Mapping[BlockKey, int], demoted: Mapping[BlockKey, int], num_keys: int
    ) -> dict[int, CopyNews]:
        """By bit: what follows from the oldest changes, so many blocks of them (mutates)."""
        spare: defaultdict[int, list[BlockKey]] = defaultdict(list)
        last: defaultdict[int, list[BlockKey]] = defaultdict(list)
        changed, told_of = self._changed, self._told
        for key in list(islice(changed, num_keys)):
            del changed[key]
            here = holders.get(key, 0)
            if demoted:
                here &= ~demoted.get(key, 0)
            told = told_of.pop(key, 0)
            if not here & (here - 1):
                if here:
                    last[here].append(key)
                continue
            told_of[key] = here
            new = here & ~told
            while new:
                bit = new & -new
                new ^= bit
                spare[bit].append(key)
        return {bit: CopyNews(spare[bit], last[bit]) for bit in {*spare, *last}}
