"""What has arrived of one operation, and what is still missing. Shared by fetches and incoming
streams; blocks are written only from within `land`, by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.landing_table import VERIFIED, LandingTable
from moonpool.messenger.transport import Connection, ProtocolError
from moonpool.messenger.wire import MAX_SLICES_PER_FRAME, OFFER
from moonpool.types import BlockId

GROUP_BYTES = 512 << 10
"""Moved, then hashed, as one: small enough to be in the cache still when it is hashed."""


class Landing:
    """`block_ids[i]` takes the slices of index `first_index + i`. So many bytes are taken from the
    connection at a time as `group_bytes` says."""

    def __init__(
        self,
        arena: Arena,
        block_ids: Sequence[BlockId],
        first_index: int,
        counters: Counters,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self.first_index = first_index
        self.num_indices = len(block_ids)
        self.num_bytes = 0
        self.corrupt_slices = 0
        self.num_layers = arena.layout.num_layers
        self._table = LandingTable(arena, block_ids, first_index)
        self._slice_bytes = arena.slice_bytes
        self._num_verified = 0
        self._whole_layers = 0
        self._group = max(1, min(MAX_SLICES_PER_FRAME, group_bytes // arena.slice_bytes))
        self._counters = counters
        arena.sums.forget(block_ids)

    def land(
        self,
        connection: Connection,
        offers: bytes,
        deadline_s: float,
        after_group: Callable[[], None] | None = None,
    ) -> None:
        """Moves the offered slices in and verifies them. ProtocolError if one is not expected."""
        if len(offers) % OFFER.size:
            raise ProtocolError(f"{len(offers)} bytes are not a whole number of slice offers")
        step = self._group * OFFER.size
        for start in range(0, len(offers), step):
            group = offers[start : start + step]
            num_slices = len(group) // OFFER.size
            num_corrupt = connection.take(group, self._table, deadline_s)
            num_bytes = self._slice_bytes * num_slices
            self.num_bytes += num_bytes
            self.corrupt_slices += num_corrupt
            self._num_verified += num_slices - num_corrupt
            self._counters.received(connection.transport, num_slices, num_bytes, num_corrupt)
            if after_group is not None:
                after_group()

    def whole_layers(self, num_rows: int) -> int:
        """Layers from the first on of which the first `num_rows` blocks are here and verified."""
        layers, cells = self.num_layers, self._table.cells
        end = num_rows * layers
        while self._whole_layers < layers:
            column = self._whole_layers
            if self._num_verified < (column + 1) * num_rows:  # counting is cheaper than looking
                break
            if cells[column:end:layers].count(VERIFIED) < num_rows:
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
        start = row * self.num_layers
        return self._table.cells.count(VERIFIED, start, start + self.num_layers) == self.num_layers
