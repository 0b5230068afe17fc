"""What has arrived of one operation, and what is still missing. Shared by fetches and incoming
streams; blocks are written only from within `land`, by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.cut import NOWHERE, Cut, passage
from moonpool.messenger.landing_table import VERIFIED, LandingTable
from moonpool.messenger.transport import Connection, PeerGoneError, ProtocolError
from moonpool.messenger.unnamed import Unnamed, has_unnamed
from moonpool.messenger.wire import MAX_SLICES_PER_FRAME, OFFER, unpack_offers
from moonpool.types import BlockId

GROUP_BYTES = 512 << 10
"""Moved, then hashed, as one: small enough to be in the cache still when it is hashed."""


class Landing:
    """`block_ids[i]` takes the slices of index `first_index + i`; those that lie NOWHERE come to
    others, and lack nothing. So many bytes are taken from the
    connection at a time as `group_bytes` says."""

    def __init__(
        self,
        arena: Arena,
        block_ids: Sequence[BlockId],
        first_index: int,
        counters: Counters,
        group_bytes: int = GROUP_BYTES,
        takes_unnamed: bool = False,
    ) -> None:
        """`takes_unnamed`: the peer may leave sums of slices to us, as long as it keeps them."""
        self.first_index = first_index
        self.num_indices = len(block_ids)
        self.num_bytes = 0
        self.corrupt_slices = 0
        self.num_layers = arena.layout.num_layers
        self._table = LandingTable(arena, block_ids, first_index)
        self.unnamed = Unnamed(arena)
        self._takes_unnamed = takes_unnamed
        self.slice_bytes = arena.slice_bytes
        self._num_verified = 0
        self._whole_layers = 0
        self._group = max(1, min(MAX_SLICES_PER_FRAME, group_bytes // arena.slice_bytes))
        self._counters = counters
        self._left_out: set[int] = set()
        self.absent = tuple(first_index + i for i, b in enumerate(block_ids) if b == NOWHERE)
        if self.absent:
            self.leave_out(self.absent)
        arena.sums.forget(b for b in block_ids if b != NOWHERE)

    def leave_out(self, indices: Sequence[int]) -> None:
        """These are others' to bring."""
        layers, cells = self.num_layers, self._table.cells
        self._left_out.update(indices)
        for index in indices:
            row = index - self.first_index
            if not 0 <= row < self.num_indices:
                raise ProtocolError(f"index {index} is left out, which is not expected")
            cells[row * layers : (row + 1) * layers] = bytes([VERIFIED]) * layers
        self._num_verified += layers * len(indices)

    @property
    def cut(self) -> Cut | None:
        """What this side keeps of slices."""
        return self._table.arena.cut

    def come_from(self, cut: Cut | None) -> None:
        """What the sender keeps of each slice. ProtocolError if it does not fit."""
        own = self.cut
        if cut != own and cut is not None and (own or not cut.fits(self.slice_bytes)):
            raise ProtocolError("the peer keeps another share of slices")
        self._table.passage = passage(cut, own)

    def ranges_of(self, row: int) -> list[tuple[int, int]]:
        """Of our slices, what has arrived of that block by this landing, in all layers."""
        if self.first_index + row in self._left_out or not self._complete(row):
            return []
        if self._table.passage is None:
            return [(0, self.slice_bytes)]
        return [(to, to + size) for _, to, size in self._table.passage.pieces]

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
        crossing = self._table.passage
        size = self.slice_bytes if crossing is None else crossing.num_bytes
        step = self._group * OFFER.size
        for start in range(0, len(offers), step):
            group = offers[start : start + step]
            num_slices = len(group) // OFFER.size
            if self._left_out:
                self._table.places(unpack_offers(group))  # none that others get is among them
            unnamed = connection.takes_unnamed and has_unnamed(group)
            if unnamed and not self._takes_unnamed:
                raise ProtocolError("slices were offered without their checksums")
            num_corrupt = connection.take(group, self._table, deadline_s)
            if unnamed:
                self._check_kept(connection, group)
            num_bytes = size * num_slices
            self.num_bytes += num_bytes
            self.corrupt_slices += num_corrupt
            self._num_verified += num_slices - num_corrupt
            self._counters.received(connection.transport, num_slices, num_bytes, num_corrupt)
            if after_group is not None:
                after_group()

    def _check_kept(self, connection: Connection, offers: bytes) -> None:
        """Where no sum tells, the peer's word counts: it closes the connection before it lets go of
        what it offered, so what was copied until now is what it meant."""
        if connection.hung_up():
            self._table.doubt(unpack_offers(offers))
            raise PeerGoneError("the peer let go of slices while they were copied")
        self.unnamed.landed(offers, self._table)

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
