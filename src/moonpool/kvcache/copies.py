"""Who was told that others have a block too: news for the instances, as the index changes.

Keeps nothing of blocks that only one instance has, and sends nothing itself. A word that is lost or
late makes an instance keep a copy too long, or, until the next word, let go of a last one.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    def note(self, key: BlockKey) -> None:
        """A block's holders changed, and are or were more than one."""
        self._changed[key] = None

    def note_dropped(self, key: BlockKey, bit: int) -> None:
        """One of several holders lost it, and what it was told of it."""
        self._changed[key] = None
        told = self._told.get(key, 0)
        if told & bit:
            self._told[key] = told ^ bit

    def note_all_dropped(self, key: BlockKey, bit: int) -> None:
        """As `note_dropped`, of a block that may never have been spare."""
        if self._told.get(key, 0) & bit:
            self.note_dropped(key, bit)

    def take_news(
        self, holders: Mapping[BlockKey, int], demoted: Mapping[BlockKey, int], num_keys: int
    ) -> dict[int, CopyNews]:
        """By bit: what follows from the oldest changes, so many blocks of them (mutates)."""
        news: dict[int, CopyNews] = {}
        for key in list(self._changed)[:num_keys]:
            del self._changed[key]
            here = holders.get(key, 0) & ~demoted.get(key, 0)
            several = here & (here - 1)
            told = self._told.pop(key, 0) if self._told else 0
            if several:
                self._told[key] = here
                _tell(news, here & ~told, key, spare=True)
            else:
                _tell(news, here, key, spare=False)
        return news


def _tell(news: dict[int, CopyNews], bits: int, key: BlockKey, spare: bool) -> None:
    while bits:
        bit = bits & -bits
        bits ^= bit
        of_instance = news.get(bit)
        if of_instance is None:
            of_instance = news[bit] = CopyNews([], [])
        (of_instance.spare if spare else of_instance.last).append(key)
