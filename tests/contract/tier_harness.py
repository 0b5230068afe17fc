"""One store below DRAM over an arena of its own, whose blocks' right contents follow from their
keys."""

from __future__ import annotations

import hashlib
import queue
import random
from collections.abc import Callable
from typing import TypeVar

import xxhash

from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import LoadEnded, LookUpEnded, MessengerEvent, StoreEnded
from moonpool.messenger.arena import Arena
from moonpool.messenger.store.tier_store import TierStore
from moonpool.types import BlockId, BlockKey

T = TypeVar("T")
NUM_BLOCKS = 48
NUM_SLOTS = 64


class Bench:
    """One store over an arena of its own, whose blocks' right contents follow from their keys."""

    def __init__(self, make: Callable[[Arena, Callable[[MessengerEvent], None]], TierStore]):
        layout = BlockLayout("tiny", "float32", 4, 3, 1, 256)
        self.arena = Arena(layout, NUM_BLOCKS)
        self.size = layout.block_bytes
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.store = make(self.arena, self.events.put)

    def event(self, kind: type[T], within_s: float = 20.0) -> T:
        found = self.events.get(timeout=within_s)
        assert isinstance(found, kind), found
        return found

    def block(self, number: int) -> memoryview:
        return self.arena.buffer[number * self.size : (number + 1) * self.size]

    def holds(self, block: int, key: BlockKey) -> bool:
        return self.block(block) == content_of(key, self.size)

    def put(self, keys: list[BlockKey], first_slot: int = 0) -> StoreEnded:
        blocks = [BlockId(number) for number in range(len(keys))]
        self.arena.sums.forget(blocks)
        for block, key in zip(blocks, keys, strict=True):
            self.block(block)[:] = content_of(key, self.size)
        slots = range(first_slot, first_slot + len(keys))
        self.store.store("s", keys, blocks, slots)
        return self.event(StoreEnded)

    def get(self, keys: list[BlockKey], first_slot: int = 0) -> LoadEnded:
        """Into wiped blocks; asserts that what is said to be right is."""
        blocks = [BlockId(NUM_BLOCKS - 1 - number) for number in range(len(keys))]
        for block in blocks:
            self.block(block)[:] = bytes(self.size)
        slots = range(first_slot, first_slot + len(keys))
        self.store.load("l", keys, slots, blocks)
        ended = self.event(LoadEnded)
        for block, key in list(zip(blocks, keys, strict=True))[: ended.num_blocks]:
            assert self.holds(block, key)
            for layer in range(3):
                right = xxhash.xxh3_64_intdigest(self.arena.slice(block, layer))
                assert self.arena.sums.get(block, layer) == right
        return ended

    def look_up(self, keys: list[BlockKey]) -> LookUpEnded:
        self.store.look_up("u", keys)
        return self.event(LookUpEnded)


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    return random.Random(key).randbytes(num_bytes)


def keys_of(what: str, count: int) -> list[BlockKey]:
    """A shared store outlives a test, so each has keys of its own."""
    names = (f"{what} {number}".encode() for number in range(count))
    return [BlockKey(hashlib.sha256(name).digest()[:16]) for name in names]
