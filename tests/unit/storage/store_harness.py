"""Runs a store over a small arena, whose block contents follow from their keys."""

from __future__ import annotations

import hashlib
import queue
import random
from pathlib import Path
from typing import TypeVar

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import LoadEnded, MessengerEvent, StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.io_threads import HANG_S
from moonpool_engine.storage.store import BlockStore, open_store
from moonpool_engine.transfer.arena import Arena

T = TypeVar("T")


def make_layout(slice_bytes: int = 256, num_layers: int = 3, model: str = "tiny") -> BlockLayout:
    """Returns a layout. Blocks with slices of 4,096 bytes bypass the page cache; blocks with 256
    bytes do not."""
    return BlockLayout(
        model_fingerprint=model,
        dtype="float32",
        block_tokens=4,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=slice_bytes // 32,
    )


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest()[:16])


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    return random.Random(key).randbytes(num_bytes)


class Bench:
    """Holds one store and its events. `open` may be called again after `close`."""

    def __init__(
        self,
        root: Path,
        layout: BlockLayout | None = None,
        num_slots: int = 16,
        num_blocks: int = 16,
        segment_bytes: int = 1 << 16,
        hang_s: float = HANG_S,
    ) -> None:
        self.root = root
        self.hang_s = hang_s
        self.arena = Arena(layout or make_layout(), num_blocks)
        self.num_slots = num_slots
        self.segment_bytes = segment_bytes
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.store: BlockStore = self.open()

    def open(self) -> BlockStore:
        self.store = open_store(
            self.root,
            "prefill-0",
            self.arena,
            self.num_slots,
            self.events.put,
            self.segment_bytes,
            self.hang_s,
        )
        return self.store

    @property
    def stored(self) -> list[tuple[int, BlockKey]]:
        return self.store.stored

    def event(self, kind: type[T], within_s: float = 60.0) -> T:
        found = self.events.get(timeout=within_s)
        assert isinstance(found, kind), found
        return found

    def fill(self, block: int, key: BlockKey) -> None:
        size = self.arena.layout.block_bytes
        self.arena.checksums.forget([BlockId(block)])
        self.arena.buffer[block * size : (block + 1) * size] = content_of(key, size)

    def holds(self, block: int, key: BlockKey) -> bool:
        size = self.arena.layout.block_bytes
        return bytes(self.arena.buffer[block * size : (block + 1) * size]) == content_of(key, size)

    def put(self, pairs: dict[int, int]) -> StoreEnded:
        """Stores blocks. `pairs` maps slots to key numbers."""
        keys = tuple(map(key_of, pairs.values()))
        blocks = tuple(map(BlockId, range(len(pairs))))
        for block, key in zip(blocks, keys, strict=True):
            self.fill(block, key)
        self.store.store("s", keys, blocks, tuple(pairs))
        return self.event(StoreEnded)

    def get(self, pairs: dict[int, int], first_block: int = 0) -> LoadEnded:
        """Loads into zeroed blocks; asserts that the blocks reported as loaded are right."""
        size = self.arena.layout.block_bytes
        keys = tuple(map(key_of, pairs.values()))
        blocks = tuple(BlockId(first_block + i) for i in range(len(pairs)))
        for block in blocks:
            self.arena.buffer[block * size : (block + 1) * size] = bytes(size)
        self.store.load("l", keys, tuple(pairs), blocks)
        ended = self.event(LoadEnded)
        for block, key in list(zip(blocks, keys, strict=True))[: ended.num_blocks]:
            assert self.holds(block, key)
        return ended
