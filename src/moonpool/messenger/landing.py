"""Where arriving slices may go, and what became of each. Shared by fetches and incoming streams.

The table has one row per expected block and one column per layer. A slice lands only in a cell of
the table, is hashed where it lies, and counts only if the hash is the one its sender named.
Used by one thread at a time; blocks are written only from within `land`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.transport import Connection, ProtocolError
from moonpool.messenger.wire import MAX_SLICES_PER_FRAME, SliceOffer
from moonpool.types import BlockId

GROUP_BYTES = 512 << 10
"""Moved, then hashed, as one: small enough to be in the cache still when it is hashed."""

Checksum = Callable[[memoryview], int]
checksum_slice: Checksum = xxhash.xxh3_64_intdigest

_VERIFIED = 1
_CORRUPT = 2


def group_slices(slice_bytes: int) -> int:
    """Slices that are moved as one group."""
    return max(1, min(MAX_SLICES_PER_FRAME, GROUP_BYTES // slice_bytes))


class Landing:
    """`block_ids[i]` takes the slices of index `first_index + i`."""

    def __init__(
        self,
        arena: Arena,
        block_ids: Sequence[BlockId],
        first_index: int,
        counters: Counters,
    ) -> None:
        for block_id in block_ids:
            if not arena.holds(block_id):
                raise ValueError(f"block {block_id} is outside the arena of {arena.num_blocks}")
        self.first_index = first_index
        self.num_indices = len(block_ids)
        self.num_bytes = 0
        self.corrupt_slices = 0
        self._arena = arena
        self._block_ids = tuple(block_ids)
        self._num_layers = arena.layout.num_layers
        self._cells = bytearray(len(block_ids) * self._num_layers)
        self._group = group_slices(arena.layout.slice_bytes)
        self._counters = counters
        arena.sums.forget(block_ids)

    def land(
        self,
        connection: Connection,
        offers: Sequence[SliceOffer],
        deadline_s: float,
        after_group: Callable[[], None] | None = None,
    ) -> None:
        """Moves the offered slices in and verifies them. ProtocolError if one is not expected."""
        for start in range(0, len(offers), self._group):
            group = offers[start : start + self._group]
            cells = [self._cell(offer) for offer in group]
            places = [self._place(cell) for cell in cells]
            connection.take(group, self._arena, places, deadline_s)
            num_corrupt = self._verify(group, cells, places)
            num_bytes = self._arena.layout.slice_bytes * len(group)
            self.num_bytes += num_bytes
            self.corrupt_slices += num_corrupt
            self._counters.received(connection.transport, len(group), num_bytes, num_corrupt)
            if after_group is not None:
                after_group()

    def _verify(
        self, offers: Sequence[SliceOffer], cells: Sequence[int], places: Sequence[int]
    ) -> int:
        """Hashes the slices where they lie, and tells how many are not what their sender named."""
        buffer, size = self._arena.buffer, self._arena.layout.slice_bytes
        num_corrupt = 0
        for offer, cell, place in zip(offers, cells, places, strict=True):
            checksum = checksum_slice(buffer[place : place + size])
            row, layer = divmod(cell, self._num_layers)
            if checksum == offer.checksum:
                self._cells[cell] = _VERIFIED
                self._arena.sums.set(self._block_ids[row], layer, checksum)
            else:
                self._cells[cell] = _CORRUPT
                self._arena.sums.set(self._block_ids[row], layer, 0)
                num_corrupt += 1
        return num_corrupt

    def restart(self) -> int:
        """What arrives from now on is numbered anew, from the first block that is not complete:
        returns how many are."""
        self.first_index = -self.verified_prefix()
        return -self.first_index

    def incomplete(self) -> tuple[int, ...]:
        """Indices of which a slice is corrupt or missing."""
        return tuple(
            self.first_index + row for row in range(self.num_indices) if not self._complete(row)
        )

    def verified_prefix(self) -> int:
        """Complete and verified blocks before the first that is not."""
        for row in range(self.num_indices):
            if not self._complete(row):
                return row
        return self.num_indices

    def _complete(self, row: int) -> bool:
        start = row * self._num_layers
        return self._cells.count(_VERIFIED, start, start + self._num_layers) == self._num_layers

    def _cell(self, offer: SliceOffer) -> int:
        row = offer.index - self.first_index
        if not (0 <= row < self.num_indices and 0 <= offer.layer < self._num_layers):
            raise ProtocolError(
                f"slice (index {offer.index}, layer {offer.layer}) is outside what is expected:"
                f" indices {self.first_index} to {self.first_index + self.num_indices - 1},"
                f" layers 0 to {self._num_layers - 1}"
            )
        return row * self._num_layers + offer.layer

    def _place(self, cell: int) -> int:
        row, layer = divmod(cell, self._num_layers)
        return self._arena.place(self._block_ids[row], layer)
