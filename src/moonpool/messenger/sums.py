"""The checksums of an arena's slices: each is computed once, when the slice is first received or
first sent, and remembered for as long as the slice is not written again.

A sum that is remembered, and not computed anew from the bytes about to be sent, is what lets a
reader see that the *source's* memory changed after the block was made. Every writer of the arena
calls `forget` before it writes: the engine for the blocks of a step, the messenger and the store
for blocks they fill. A writer that failed to would be seen as corruption: a miss, not an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from moonpool.types import BlockId

_UNKNOWN = 0  # a slice whose sum is 0 in truth is merely hashed each time


class Sums:
    """Thread-safe. 8 bytes per slice."""

    def __init__(self, num_blocks: int, num_layers: int) -> None:
        self._num_layers = num_layers
        self._sums = array("Q", bytes(8 * num_blocks * num_layers))
        self._block_of_unknown = array("Q", bytes(8 * num_layers))

    @property
    def address(self) -> int:
        """Where they lie in memory, one after the other by the slice's number, for native code."""
        return self._sums.buffer_info()[0]

    def get(self, block_id: BlockId, layer: int) -> int:
        """The slice's xxh3_64, or 0 if it is not known."""
        return self._sums[block_id * self._num_layers + layer]

    def set(self, block_id: BlockId, layer: int, checksum: int) -> None:
        """To be called when the slice's bytes are complete, and are what was hashed."""
        self._sums[block_id * self._num_layers + layer] = checksum

    def set_slice(self, number: int, checksum: int) -> None:
        """The same, by the slice's number in the arena."""
        self._sums[number] = checksum

    def get_many(self, numbers: np.ndarray) -> np.ndarray:
        """By the slices' numbers in the arena: int64 in, uint64 out."""
        found: np.ndarray = np.frombuffer(self._sums, np.uint64)[numbers]
        return found

    def set_many(self, numbers: np.ndarray, checksums: np.ndarray) -> None:
        np.frombuffer(self._sums, np.uint64)[numbers] = checksums

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """These blocks are about to be written."""
        num_layers = self._num_layers
        for block_id in block_ids:
            start = block_id * num_layers
            self._sums[start : start + num_layers] = self._block_of_unknown
