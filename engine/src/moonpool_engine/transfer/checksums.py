"""Checksums (xxh3_64) of the slices in an arena.

`SliceChecksums` stores one checksum per slice. It is computed once, when the slice is first
received or first sent, and kept until the slice is written again. A stored checksum is sent with
the slice instead of one computed from the bytes at that moment; so a reader detects that the
source's memory changed after the block was made. Every writer of the arena calls `forget` first:
the engine for the blocks of a step, the messenger and the store for the blocks they fill. A writer
that fails to do so causes a checksum mismatch: a cache miss, never a wrong answer.

`DeferredChecksums` covers slices of a stream that are offered before their checksum is known.
Within a host the receiver computes these checksums while it copies, and returns them at the end of
the stream: the bytes are read once, not twice. The sender leaves the slices unchanged until then,
or closes the connection first. Reads always carry checksums, since their lease may expire.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from moonpool.types import BlockId
from moonpool_engine.transfer.errors import ProtocolError
from moonpool_engine.transfer.wire import MAX_DEFERRED_CHECKSUMS

Checksum = Callable[[memoryview], int]
checksum_slice: Checksum = xxhash.xxh3_64_intdigest

_SliceNumbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_OFFERS = np.dtype([("index", "<i8"), ("layer", "<i8"), ("block", "<i8"), ("checksum", "<u8")])


class SliceChecksums:
    """The known checksums of an arena's slices. Thread-safe. Takes 8 bytes per slice.

    0 means unknown. A slice whose checksum happens to be 0 is hashed each time."""

    def __init__(self, num_blocks: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self._checksums = array("Q", bytes(8 * num_blocks * num_layers))
        self._unknown_block = array("Q", bytes(8 * num_layers))

    @property
    def address(self) -> int:
        """The memory address of the checksums, ordered by slice number, for native code."""
        return self._checksums.buffer_info()[0]

    def get(self, block_id: BlockId, layer: int) -> int:
        """Returns the slice's xxh3_64, or 0 if it is unknown."""
        return self._checksums[block_id * self.num_layers + layer]

    def get_block(self, block_id: BlockId) -> array[int]:
        """Returns the checksums of a block's slices, of which unknown ones are 0."""
        start = block_id * self.num_layers
        return self._checksums[start : start + self.num_layers]

    def set(self, block_id: BlockId, layer: int, checksum: int) -> None:
        """Stores the checksum of a slice. Its bytes must be complete and the ones hashed."""
        self._checksums[block_id * self.num_layers + layer] = checksum

    def set_slice(self, number: int, checksum: int) -> None:
        """Stores the checksum of the slice with this number in the arena."""
        self._checksums[number] = checksum

    def get_many(self, numbers: np.ndarray) -> np.ndarray:
        """Returns uint64 checksums for int64 slice numbers."""
        found: np.ndarray = np.frombuffer(self._checksums, np.uint64)[numbers]
        return found

    def set_many(self, numbers: np.ndarray, checksums: np.ndarray) -> None:
        """Stores uint64 checksums for int64 slice numbers."""
        np.frombuffer(self._checksums, np.uint64)[numbers] = checksums

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Drops the checksums of blocks that are about to be written."""
        num_layers = self.num_layers
        for block_id in block_ids:
            start = block_id * num_layers
            self._checksums[start : start + num_layers] = self._unknown_block


class DeferredChecksums:
    """The slices of one stream that were offered without a checksum, as one side sees them.

    Both sides note them in the order of the offers, up to the number that one message holds. A
    sender that gets no checksum for a slice stores none, and hashes the slice the next time it
    sends it. Used by one thread."""

    def __init__(self, checksums: SliceChecksums) -> None:
        """`checksums`: the checksums of this side's arena."""
        self._checksums = checksums
        self._numbers: list[_SliceNumbers] = []
        self._count = 0

    def note_sent(self, offers: bytes) -> None:
        """Notes slices of this side's own blocks."""
        found = _without_checksum(offers)
        if len(found):
            self._note(found["block"] * self._checksums.num_layers + found["layer"])

    def note_received(self, offers: bytes, blocks: array[int], first_index: int) -> None:
        """Notes slices that were received and hashed. Index `first_index + i` went to
        `blocks[i]`."""
        found = _without_checksum(offers)
        if len(found):
            targets = np.frombuffer(blocks, np.int64)[found["index"] - first_index]
            self._note(targets * self._checksums.num_layers + found["layer"])

    def encode(self) -> bytes:
        """Returns the receiver's checksums of the noted slices, for the sender."""
        return self._checksums.get_many(self._all()).astype("<u8").tobytes()

    def apply(self, checksums: bytes) -> None:
        """Stores the checksums that the receiver returned. Raises ProtocolError if their number
        differs from the number of slices sent without one."""
        numbers = self._all()
        if len(checksums) != 8 * len(numbers):
            raise ProtocolError(f"{len(checksums)} bytes of checksums of {len(numbers)} slices")
        self._checksums.set_many(numbers, np.frombuffer(checksums, "<u8"))

    def _note(self, numbers: _SliceNumbers) -> None:
        numbers = numbers[: MAX_DEFERRED_CHECKSUMS - self._count]
        self._count += len(numbers)
        self._numbers.append(numbers)

    def _all(self) -> _SliceNumbers:
        return np.concatenate(self._numbers) if self._numbers else np.zeros(0, np.int64)


def has_deferred(offers: bytes) -> bool:
    """Whether any of these packed offers lacks its checksum."""
    return len(_without_checksum(offers)) > 0


def _without_checksum(offers: bytes) -> np.ndarray:
    unpacked = np.frombuffer(offers, _OFFERS)
    found: np.ndarray = unpacked[unpacked["checksum"] == 0]
    return found
