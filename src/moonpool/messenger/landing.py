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
        self.num_layers = self._num_layers = arena.layout.num_layers
        self._cells = bytearray(len(block_ids) * self._num_layers)
        self._num_verified = 0
        self._whole_layers = 0
        self._group = group_slices(arena.slice_bytes)
        self._counters = counters
        self._remember = arena.sums.set_slice
        arena.sums.forget(block_ids)

    def land(
        self,
        connection: Connection,
        offers: Sequence[SliceOffer],
        deadline_s: float,
        after_group: Callable[[], None] | None = None,
    ) -> None:
        """Moves the offered slices in and verifies them. ProtocolError if one is not expected."""
        size = self._arena.slice_bytes
        for start in range(0, len(offers), self._group):
            group = offers[start : start + self._group]
            places = self._places(group)
            connection.take(group, self._arena, places, deadline_s)
            num_corrupt = self._verify(group, places)
            num_bytes = size * len(group)
            self.num_bytes += num_bytes
            self.corrupt_slices += num_corrupt
            self._counters.received(connection.transport, len(group), num_bytes, num_corrupt)
            if after_group is not None:
                after_group()

    # The two loops below run once per slice: they call as little as they can.

    def _places(self, offers: Sequence[SliceOffer]) -> list[int]:
        """Where in the arena each goes. ProtocolError if one of them is not expected."""
        arena, block_ids = self._arena, self._block_ids
        first, rows, layers = self.first_index, self.num_indices, self._num_layers
        block_bytes, size = arena.block_bytes, arena.slice_bytes
        places = []
        for offer in offers:
            row, layer = offer.index - first, offer.layer
            if not (0 <= row < rows and 0 <= layer < layers):
                raise ProtocolError(
                    f"slice (index {offer.index}, layer {layer}) is outside what is expected:"
                    f" indices {first} to {first + rows - 1}, layers 0 to {layers - 1}"
                )
            places.append(block_ids[row] * block_bytes + layer * size)
        return places

    def _verify(self, offers: Sequence[SliceOffer], places: Sequence[int]) -> int:
        """Hashes the slices where they lie, and tells how many are not what their sender named."""
        buffer, size, remember = self._arena.buffer, self._arena.slice_bytes, self._remember
        cells, first, layers = self._cells, self.first_index, self._num_layers
        num_corrupt = 0
        for offer, place in zip(offers, places, strict=True):
            checksum = checksum_slice(buffer[place : place + size])
            cell = (offer.index - first) * layers + offer.layer
            if checksum == offer.checksum:
                cells[cell] = _VERIFIED
                remember(place // size, checksum)
            else:
                cells[cell] = _CORRUPT
                remember(place // size, 0)
                num_corrupt += 1
        self._num_verified += len(offers) - num_corrupt
        return num_corrupt

    def whole_layers(self, num_rows: int) -> int:
        """Layers from the first on of which the first `num_rows` blocks are here and verified."""
        layers = self._num_layers
        end = num_rows * layers
        while self._whole_layers < layers:
            column = self._whole_layers
            if self._num_verified < (column + 1) * num_rows:  # counting is cheaper than looking
                break
            if self._cells[column:end:layers].count(_VERIFIED) < num_rows:
                break
            self._whole_layers += 1
        return self._whole_layers

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
