"""The ledger of kept memory: which block of an arena holds which key, for the next process.

A record is a row of u64: sequence (0: void), key (2), xxh3 of each slice, and xxh3 of the block's
number and all before. A process may be killed at any instruction, so:

    a key is given    the slices are hashed by a thread --> the record is written
    a key is taken    the record is voided --> only then may the block be overwritten

`recover` trusts neither: a record counts only if its own checksum is right and every slice of the
block still has the checksum in the record. So a block that was half written when its process died
counts as a miss.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.io_threads import IoThreadPool, Task
from moonpool_engine.storage.kept_memory import HEAD_BYTES
from moonpool_engine.transfer.arena import Arena, checksum_slice

MAX_WAITING = 65_536
"""Tasks that may wait to be hashed. Beyond this number, blocks are not entered in the ledger."""
HASH_NICE = 10
RECOVER_THREADS = 4
_CLOSE_S = 10.0

Row = np.ndarray[tuple[int], np.dtype[np.uint64]]


class BlockLedger:
    """The records of one arena. Only one thread may call `note` and `close`."""

    def __init__(self, arena: Arena, memory: mmap.mmap) -> None:
        self._arena = arena
        self._num_layers = arena.layout.num_layers
        flat = np.frombuffer(memory, np.uint64, offset=HEAD_BYTES)
        width = self._num_layers + 4
        self._rows = flat[: arena.num_blocks * width].reshape(arena.num_blocks, width)
        self._next = int(self._rows[:, 0].max()) + 1 if arena.num_blocks else 1
        self._lock = threading.Lock()  # guards the fields below, and the rows
        self._changes = [0] * arena.num_blocks  # number of changes of each block's key
        self._threads = IoThreadPool("ledger", 1, MAX_WAITING, HASH_NICE)

    @property
    def names_any(self) -> bool:
        """Whether any record names a key, right or not."""
        return bool(self._rows[:, 0].any())

    def recover(self) -> tuple[list[tuple[BlockId, BlockKey]], int]:
        """Verifies all blocks, and voids the records of blocks that fail. Returns the verified
        blocks, the oldest first, and how many were damaged. Must be called once, before `note`."""
        named = np.flatnonzero(self._rows[:, 0])
        order = named[np.argsort(self._rows[named, 0], kind="stable")]
        blocks = [BlockId(int(block)) for block in order]
        with ThreadPoolExecutor(min(RECOVER_THREADS, os.cpu_count() or 1)) as pool:
            right = list(pool.map(self._verify, blocks))
        kept: dict[BlockKey, BlockId] = {}
        for block_id, is_right in zip(blocks, right, strict=True):
            key = BlockKey(self._rows[block_id, 1:3].tobytes())
            if not is_right or key in kept:
                self._rows[block_id, 0] = 0
            else:
                kept[key] = block_id
        return [(block_id, key) for key, block_id in kept.items()], right.count(False)

    def note(
        self, changes: Iterable[tuple[BlockId, BlockKey | None]], at_once: bool = False
    ) -> None:
        """Notes the blocks whose keys have changed, with their present keys. Must be called before
        anything can overwrite a block that has lost its key. Another thread hashes the blocks and
        writes their records; with `at_once`, they are written before the return, which is quick for
        blocks whose checksums are known."""
        named: list[Task] = []
        with self._lock:
            for block_id, key in changes:
                self._rows[block_id, 0] = 0
                self._changes[block_id] += 1
                if key is not None:
                    named.append(partial(self._name, block_id, key, self._changes[block_id]))
        if at_once:
            for task in named:
                task()
        elif named:
            self._threads.submit(named)

    def close(self) -> None:
        """Waits for the blocks that are still to be hashed."""
        self._threads.close(_CLOSE_S)

    def _name(self, block_id: BlockId, key: BlockKey, change: int) -> None:
        if self._changes[block_id] != change:
            return
        stored = self._arena.checksums
        known = stored.get_block(block_id)
        sums = [
            checksum or checksum_slice(self._arena.slice(block_id, layer))
            for layer, checksum in enumerate(known)
        ]
        with self._lock:
            if self._changes[block_id] != change:
                return  # the bytes may have been overwritten while they were hashed
            row = self._row(block_id, self._next, key, sums)
            self._next += 1
            if not all(known):
                for layer, checksum in enumerate(sums):
                    stored.set(block_id, layer, checksum)
            self._rows[block_id, 1:] = row[1:]
            self._rows[block_id, 0] = row[0]

    def _row(self, block_id: BlockId, sequence: int, key: bytes, sums: Sequence[int]) -> Row:
        row = np.empty(self._num_layers + 4, np.uint64)
        row[0] = sequence
        row[1:3] = np.frombuffer(key, np.uint64)
        row[3:-1] = sums
        row[-1] = _seal(block_id, row)
        return row

    def _verify(self, block_id: BlockId) -> bool:
        """Whether record and bytes are right. Stores the checksums of the slices that are."""
        row = self._rows[block_id].copy()
        if int(row[-1]) != _seal(block_id, row):
            return False
        for layer in range(self._num_layers):
            expected = int(row[3 + layer])
            if checksum_slice(self._arena.slice(block_id, layer)) != expected:
                return False
            self._arena.checksums.set(block_id, layer, expected)
        return True


def _seal(block_id: BlockId, row: Row) -> int:
    return checksum_slice(memoryview(block_id.to_bytes(8, "little") + row[:-1].tobytes()))
