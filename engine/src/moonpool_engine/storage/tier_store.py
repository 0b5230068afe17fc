"""The common part of all stores below DRAM: their interface, their counters, and their access to
the arena's blocks. `store` keeps blocks on this machine's SSD; `mooncake` keeps them in a store
that other instances and other clusters also use.

Every operation returns at once and ends with exactly one terminal event. Until that event the
operation may access its blocks, and never afterwards. Loaded blocks are verified slice by slice.
Any failure is an error in the event, which a request sees as a cache miss.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from moonpool.types import BlockId, BlockKey, Struct
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.storage.format import Geometry, SlotHeader, checksum
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.gate import LayerGate
from moonpool_engine.transfer.slice_copier import fastest_copier
from moonpool_engine.transfer.wire import pack_offers


class StoreCounts(Struct, frozen=True):
    """A snapshot of the counters. Seconds are summed over threads."""

    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    corrupt_slices: int = 0
    damaged_blocks: int = 0
    failed_operations: int = 0


class StoreCounters:
    """Running totals of a store, for /metrics; never reset. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = StoreCounts()

    def add(self, more: StoreCounts) -> None:
        with self._lock:
            totals = {
                name: getattr(self._totals, name) + getattr(more, name)
                for name in StoreCounts.__struct_fields__
            }
            self._totals = StoreCounts(**totals)

    def counts(self) -> StoreCounts:
        with self._lock:
            return self._totals


class TierStore(Protocol):
    """A store for blocks below DRAM. `tests/contract/test_stores.py` is the full specification."""

    @property
    def name(self) -> str:
        """The kind of store, in words for people."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other instances use it: it may then hold blocks that were not stored here, and
        lose blocks that were."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots are numbered 0 ... num_slots - 1."""
        ...

    @property
    def stored(self) -> Sequence[tuple[int, BlockKey]]:
        """The blocks found at the start, as (slot, key), least recently used first."""
        ...

    @property
    def read_bytes_per_s(self) -> float:
        """Returns a first estimate of the read rate."""
        ...

    def describe(self) -> str:
        """Returns one line for the log."""
        ...

    def counts(self) -> StoreCounts: ...

    def store(
        self,
        store_id: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        slots: Sequence[int],
    ) -> None:
        """Writes block `block_ids[i]`, whose key is `keys[i]`, to `slots[i]`. Ends with
        StoreEnded."""
        ...

    def load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        gate: LayerGate | None = None,
    ) -> None:
        """Reads `keys[i]`, which should be in `slots[i]`, into `block_ids[i]`. Ends with LoadEnded.

        With a `gate`, it reads layer after layer of all blocks, as far as the size of a layer
        allows. The store then opens the gate and posts LoadProgress."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """Notes that this instance no longer needs these slots, so that they may be overwritten."""
        ...

    def close(self) -> None:
        """Waits for the running operations. Waiting operations end with an error."""
        ...


@runtime_checkable
class SharedStore(TierStore, Protocol):
    """A store that other instances fill, too; a look-up finds what it contains."""

    def look_up(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        """Finds how many leading `keys` the store holds. Ends with LookUpEnded."""
        ...


class ArenaBlocks:
    """An arena's blocks, as a store reads and writes them. Thread-safe if one thread at a time
    moves each block."""

    def __init__(self, arena: Arena, geometry: Geometry) -> None:
        self._arena = arena
        self._geometry = geometry
        self._copier = fastest_copier(arena, open_slices())

    def block(self, block_id: BlockId) -> memoryview:
        """Returns the block's bytes."""
        start = block_id * self._geometry.block_bytes
        return self._arena.buffer[start : start + self._geometry.block_bytes]

    def layers(self, block_id: BlockId, first: int, end: int) -> memoryview:
        """Returns the block's bytes of layers `first` to `end` - 1."""
        size = self._geometry.slice_bytes
        return self.block(block_id)[first * size : end * size]

    def checksums(self, block_id: BlockId) -> tuple[int, ...]:
        """Returns the checksum of each slice: the stored one where it is known. So a block that has
        changed in memory since it was computed is detected when it is read back."""
        stored, layers = self._arena.checksums, self._geometry.num_layers
        known = stored.get_block(block_id)
        return tuple(
            known[layer] or checksum(self._arena.slice(block_id, layer)) for layer in range(layers)
        )

    def count_wrong(
        self,
        block_id: BlockId,
        key: BlockKey,
        header: SlotHeader | None,
        first: int = 0,
        end: int | None = None,
    ) -> int:
        """Verifies layers `first` to `end` - 1 of a block that was just read, and returns the
        number of wrong slices. Returns 1 if the header does not name this block: it was torn or
        overwritten. Stores the checksums of the right slices."""
        if header is None or header.key != key:
            return 1
        end = self._geometry.num_layers if end is None else end
        stored = self._arena.checksums
        self._sum(block_id, first, end)
        found = np.array(stored.get_block(block_id)[first:end], np.uint64)
        wrong = np.flatnonzero(found != np.array(header.checksums[first:end], np.uint64))
        for index in wrong:
            stored.set(block_id, first + int(index), 0)
        return len(wrong)

    def _sum(self, block_id: BlockId, first: int, end: int) -> None:
        """Computes the checksums of some layers from their bytes, with one call that does not hold
        the GIL: with one call per slice, reading threads would wait for each other."""
        count = end - first
        for layer in range(first, end):
            self._arena.checksums.set(block_id, layer, 0)
        offers = bytearray(pack_offers([(0, layer, block_id, 0) for layer in range(first, end)]))
        most_bytes = count * self._geometry.slice_bytes
        self._copier.fill_checksums(self._arena, offers, 0, count, most_bytes)
