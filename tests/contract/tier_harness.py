"""Runs a store below DRAM over an arena of its own, whose block contents follow from their keys."""

from __future__ import annotations

import hashlib
import queue
import random
from collections.abc import Callable
from typing import TypeVar

import xxhash

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    LoadEnded,
    LoadProgress,
    LookUpEnded,
    MessengerEvent,
    StoreEnded,
)
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.tier_store import SharedStore, TierStore
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.gate import LayerGate

T = TypeVar("T")
NUM_BLOCKS = 48
NUM_SLOTS = 64


class Bench:
    """Holds a store and its arena, whose block contents follow from their keys."""

    def __init__(self, make: Callable[[Arena, Callable[[MessengerEvent], None]], TierStore]):
        layout = BlockLayout("tiny", "float32", 4, 3, 1, 256)
        self.arena = Arena(layout, NUM_BLOCKS)
        self.size = layout.block_bytes
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.store = make(self.arena, self.events.put)

    def event(self, kind: type[T], within_s: float = 60.0) -> T:
        found = self.events.get(timeout=within_s)
        assert isinstance(found, kind), found
        return found

    def block(self, number: int) -> memoryview:
        return self.arena.buffer[number * self.size : (number + 1) * self.size]

    def holds(self, block: int, key: BlockKey) -> bool:
        return self.block(block) == content_of(key, self.size)

    def put(self, keys: list[BlockKey], first_slot: int = 0) -> StoreEnded:
        blocks = [BlockId(number) for number in range(len(keys))]
        self.arena.checksums.forget(blocks)
        for block, key in zip(blocks, keys, strict=True):
            self.block(block)[:] = content_of(key, self.size)
        slots = range(first_slot, first_slot + len(keys))
        self.store.store("s", keys, blocks, slots)
        return self.event(StoreEnded)

    def get(self, keys: list[BlockKey], first_slot: int = 0) -> LoadEnded:
        """Loads into zeroed blocks; asserts that the blocks reported as loaded are right."""
        return self._get(keys, first_slot, None)[0]

    def get_by_layer(
        self, keys: list[BlockKey], gate: LayerGate, first_slot: int = 0, right: bool = True
    ) -> tuple[LoadEnded, list[LoadProgress]]:
        """Loads like `get`, and also returns the progress events. Without `right`, the contents are
        not checked."""
        return self._get(keys, first_slot, gate, right)

    def _get(
        self, keys: list[BlockKey], first_slot: int, gate: LayerGate | None, right: bool = True
    ) -> tuple[LoadEnded, list[LoadProgress]]:
        blocks = [BlockId(NUM_BLOCKS - 1 - number) for number in range(len(keys))]
        for block in blocks:
            self.block(block)[:] = bytes(self.size)
        slots = range(first_slot, first_slot + len(keys))
        self.store.load("l", keys, slots, blocks, gate)
        told: list[LoadProgress] = []
        while isinstance(ended := self.events.get(timeout=60), LoadProgress):
            told.append(ended)
            for layer in range(ended.num_layers):
                assert gate is not None and gate.wait(layer, 0.0)
                for block, key in zip(blocks, keys, strict=True):
                    assert self.holds_layer(block, key, layer) or not right
        assert isinstance(ended, LoadEnded), ended
        for block, key in list(zip(blocks, keys, strict=True))[: ended.num_blocks]:
            assert self.holds(block, key) or not right
            for layer in range(3):
                found = xxhash.xxh3_64_intdigest(self.arena.slice(block, layer))
                assert self.arena.checksums.get(block, layer) == found
        return ended, told

    def holds_layer(self, block: int, key: BlockKey, layer: int) -> bool:
        size = self.arena.slice_bytes
        right = content_of(key, self.size)[layer * size : (layer + 1) * size]
        return self.arena.slice(block, layer) == right

    def look_up(self, keys: list[BlockKey]) -> LookUpEnded:
        assert isinstance(self.store, SharedStore)
        self.store.look_up("u", keys)
        return self.event(LookUpEnded)


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    return random.Random(key).randbytes(num_bytes)


def keys_of(what: str, count: int) -> list[BlockKey]:
    """Returns keys of one test: a shared store outlives the test."""
    names = (f"{what} {number}".encode() for number in range(count))
    return [BlockKey(hashlib.sha256(name).digest()[:16]) for name in names]
