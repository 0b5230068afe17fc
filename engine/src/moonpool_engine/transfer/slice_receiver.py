"""Receives the slices of one operation into an arena and records which ones are verified.

Fetches and incoming streams share this class. The record has one row per expected block and one
column per layer. A slice counts only if its checksum equals the one that its sender offered.
Blocks are written only from within `receive`, by one thread at a time. The transport of the
connection and its `slice_copier` move the bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.log_limit import limited_logger
from moonpool.types import BlockId
from moonpool_engine.transfer.arena import Arena, DeferredChecksums, checksum_slice, has_deferred
from moonpool_engine.transfer.counters import Counters
from moonpool_engine.transfer.errors import PeerGoneError, ProtocolError
from moonpool_engine.transfer.reshard import NOWHERE, ReshardPlan, ShardView, reshard_plan
from moonpool_engine.transfer.wire import MAX_SLICES_PER_FRAME, OFFER, SliceOffer, unpack_offers

_log = limited_logger(__name__)
GROUP_BYTES = 512 << 10
"""Bytes that are first copied and then hashed as one group; few enough to be in the CPU cache when
they are hashed."""

MISSING = 0
VERIFIED = 1
CORRUPT = 2


class SliceSource(Protocol):
    """The part of a connection that a receiver uses."""

    transport: str
    defers_checksums: bool

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int: ...

    def hung_up(self) -> bool: ...


class SliceReceiver:
    """Block `block_ids[i]` receives the slices of index `first_index + i`. An index whose block is
    NOWHERE belongs to another peer and counts as complete."""

    def __init__(
        self,
        arena: Arena,
        block_ids: Sequence[BlockId],
        first_index: int,
        counters: Counters,
        group_bytes: int = GROUP_BYTES,
        accepts_deferred: bool = False,
    ) -> None:
        """`group_bytes`: number of bytes taken from the connection at a time. `accepts_deferred`:
        whether the peer may leave checksums to this side, because it keeps the slices unchanged.
        Raises ValueError if a block is outside the arena."""
        for block_id in block_ids:
            if not arena.holds(block_id) and block_id != NOWHERE:
                raise ValueError(f"block {block_id} is outside the arena of {arena.num_blocks}")
        self.arena = arena
        self.first_index = first_index
        self.num_indices = len(block_ids)
        self.num_layers = arena.layout.num_layers
        self.slice_bytes = arena.slice_bytes
        self.blocks = array("q", block_ids)
        self.states = bytearray(len(block_ids) * self.num_layers)
        self.reshard_plan: ReshardPlan | None = None
        self.num_bytes = 0
        self.corrupt_slices = 0
        self.deferred = DeferredChecksums(arena.checksums)
        self._accepts_deferred = accepts_deferred
        self._counters = counters
        self._group = max(1, min(MAX_SLICES_PER_FRAME, group_bytes // arena.slice_bytes))
        self._num_verified = 0
        self._complete_layers = 0
        self._skipped: set[int] = set()
        self.absent = tuple(first_index + i for i, b in enumerate(block_ids) if b == NOWHERE)
        if self.absent:
            self.skip(self.absent)
        arena.checksums.forget(b for b in block_ids if b != NOWHERE)

    # Methods about what is expected

    @property
    def shard_view(self) -> ShardView | None:
        """The part of each slice that this side stores."""
        return self.arena.shard_view

    def skip(self, indices: Sequence[int]) -> None:
        """Marks these indices as complete, because other peers bring them. Raises ProtocolError."""
        layers = self.num_layers
        self._skipped.update(indices)
        for index in indices:
            row = index - self.first_index
            if not 0 <= row < self.num_indices:
                raise ProtocolError(f"index {index} is absent at the peer but was not expected")
            self.states[row * layers : (row + 1) * layers] = bytes([VERIFIED]) * layers
        self._num_verified += layers * len(indices)

    def set_source_view(self, source_view: ShardView | None) -> None:
        """Sets the part of each slice that the sender stores. Raises ProtocolError if it does not
        fit this side's."""
        own = self.shard_view
        fits = source_view is None or (not own and source_view.fits(self.slice_bytes))
        if source_view != own and not fits:
            raise ProtocolError("the peer stores another part of each slice")
        self.reshard_plan = reshard_plan(source_view, own)

    # Receiving

    def receive(
        self,
        connection: SliceSource,
        offers: bytes,
        deadline_s: float,
        after_group: Callable[[], None] | None = None,
    ) -> None:
        """Copies the offered slices into the arena and verifies them. Calls `after_group` after
        each group. Raises ProtocolError if a slice is not expected."""
        if len(offers) % OFFER.size:
            raise ProtocolError(f"{len(offers)} bytes are not a whole number of slice offers")
        plan = self.reshard_plan
        size = self.slice_bytes if plan is None else plan.num_bytes
        step = self._group * OFFER.size
        for start in range(0, len(offers), step):
            group = offers[start : start + step]
            num_slices = len(group) // OFFER.size
            if self._skipped:
                self.offsets(unpack_offers(group))  # rejects slices that other peers should bring
            deferred = connection.defers_checksums and has_deferred(group)
            if deferred and not self._accepts_deferred:
                raise ProtocolError("slices were offered without their checksums")
            num_corrupt = connection.receive_slices(group, self, deadline_s)
            if deferred or num_corrupt:
                self._check_unchanged(connection, group, deferred)
            num_bytes = size * num_slices
            self.num_bytes += num_bytes
            self.corrupt_slices += num_corrupt
            self._num_verified += num_slices - num_corrupt
            self._counters.received(connection.transport, num_slices, num_bytes, num_corrupt)
            if after_group is not None:
                after_group()

    def _check_unchanged(self, connection: SliceSource, offers: bytes, deferred: bool) -> None:
        """Without a checksum the sender's promise counts: it closes the connection before it reuses
        the slices that it offered. So slices copied while the connection is open are the offered
        ones, and only then does a different checksum mean damage."""
        if connection.hung_up():
            if deferred:
                self._mark_missing(unpack_offers(offers))
            raise PeerGoneError("the peer closed the connection while its slices were copied")
        if deferred:
            self.deferred.note_received(offers, self.blocks, self.first_index)

    def _mark_missing(self, offers: Sequence[SliceOffer]) -> None:
        for (index, layer, _, _), offset in zip(offers, self.offsets(offers), strict=True):
            self.states[(index - self.first_index) * self.num_layers + layer] = MISSING
            self.arena.checksums.set_slice(offset // self.slice_bytes, 0)

    # For transports. The two loops run once per slice and call as little as possible.

    def offsets(self, offers: Sequence[SliceOffer]) -> list[int]:
        """Returns each slice's offset in the arena. Raises ProtocolError if one is not expected."""
        arena, blocks, first, layers = self.arena, self.blocks, self.first_index, self.num_layers
        rows, block_bytes, size = len(blocks), arena.block_bytes, arena.slice_bytes
        offsets = []
        for index, layer, _, _ in offers:
            row = index - first
            if not (0 <= row < rows and 0 <= layer < layers):
                raise ProtocolError(
                    f"slice (index {index}, layer {layer}) is outside what is expected:"
                    f" indices {first} to {first + rows - 1}, layers 0 to {layers - 1}"
                )
            if blocks[row] == NOWHERE:
                raise ProtocolError(f"slice (index {index}, layer {layer}) belongs to another peer")
            offsets.append(blocks[row] * block_bytes + layer * size)
        return offsets

    def verify(
        self, offers: Sequence[SliceOffer], offsets: Sequence[int], accept_deferred: bool = False
    ) -> int:
        """Hashes slices in the arena and returns how many differ from the offered checksum. With
        `accept_deferred`, a slice offered without a checksum counts as right."""
        arena = self.arena
        buffer, size, store = arena.buffer, arena.slice_bytes, arena.checksums.set_slice
        states, first, layers = self.states, self.first_index, self.num_layers
        pieces = () if self.reshard_plan is None else self.reshard_plan.pieces
        # A checksum is stored only if it covers all that this arena stores of the slice.
        whole = not pieces or arena.shard_view is not None
        num_corrupt = 0
        for (index, layer, _, offered), offset in zip(offers, offsets, strict=True):
            if pieces:
                parts = [buffer[offset + to : offset + to + n] for _, to, n in pieces]
                checksum = checksum_slice(memoryview(b"".join(parts)))
            else:
                checksum = checksum_slice(buffer[offset : offset + size])
            same = checksum == offered or (accept_deferred and not offered)
            states[(index - first) * layers + layer] = VERIFIED if same else CORRUPT
            store(offset // size, checksum if same and whole else 0)
            num_corrupt += not same
        return num_corrupt

    def tell_damage(self, what: str) -> None:
        """Logs the slices with a wrong checksum, if there are any. `what`: the name of the
        operation."""
        if self.corrupt_slices:
            _log.warning(
                "%s: %d slices arrived with a wrong checksum and are computed again; check the"
                " memory of both machines and the network between them",
                what,
                self.corrupt_slices,
            )

    # Methods about what has arrived

    def complete_layers(self, num_rows: int) -> int:
        """Returns the number of leading layers that are verified for the first `num_rows`
        blocks."""
        layers, states = self.num_layers, self.states
        end = num_rows * layers
        while self._complete_layers < layers:
            column = self._complete_layers
            if self._num_verified < (column + 1) * num_rows:  # cheaper than a scan of the column
                break
            if states[column:end:layers].count(VERIFIED) < num_rows:
                break
            self._complete_layers += 1
        return self._complete_layers

    def complete_blocks(self) -> int:
        """Returns the number of leading blocks that are complete and verified."""
        for row in range(self.num_indices):
            if not self._complete(row):
                return row
        return self.num_indices

    def incomplete(self) -> tuple[int, ...]:
        """Returns the indices of which a slice is corrupt or missing."""
        return tuple(
            self.first_index + row for row in range(self.num_indices) if not self._complete(row)
        )

    def received_ranges(self, row: int) -> list[tuple[int, int]]:
        """Returns the byte ranges of a slice that this receiver got in every layer of the block."""
        if self.first_index + row in self._skipped or not self._complete(row):
            return []
        if self.reshard_plan is None:
            return [(0, self.slice_bytes)]
        return [(to, to + size) for _, to, size in self.reshard_plan.pieces]

    def _complete(self, row: int) -> bool:
        start = row * self.num_layers
        return self.states.count(VERIFIED, start, start + self.num_layers) == self.num_layers


def count_covered_blocks(receivers: Sequence[SliceReceiver]) -> int:
    """Returns the number of leading blocks that these receivers, each filled by another peer,
    together hold completely."""
    for row in range(receivers[0].num_indices):
        covered = 0
        for start, end in sorted(
            r for receiver in receivers for r in receiver.received_ranges(row)
        ):
            if start <= covered:
                covered = max(covered, end)
        if covered < receivers[0].slice_bytes:
            return row
    return receivers[0].num_indices
