"""Where the slices of one operation may go, and what became of each: one row per expected block,
one column per layer. A slice counts only if its hash is the one that its sender named.

Owns no bytes and moves none (`mover` does). Used by one thread at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import xxhash

from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import NOWHERE, Passage
from moonpool.messenger.transport import ProtocolError
from moonpool.messenger.wire import SliceOffer
from moonpool.types import BlockId

Checksum = Callable[[memoryview], int]
checksum_slice: Checksum = xxhash.xxh3_64_intdigest

VERIFIED = 1
CORRUPT = 2


class LandingTable:
    """`blocks[i]` of the arena takes the slices of index `first + i`, unless that is NOWHERE: then
    others do. ValueError on a block that is outside the arena."""

    def __init__(self, arena: Arena, block_ids: Sequence[BlockId], first: int) -> None:
        for block_id in block_ids:
            if not arena.holds(block_id) and block_id != NOWHERE:
                raise ValueError(f"block {block_id} is outside the arena of {arena.num_blocks}")
        self.arena = arena
        self.first = first
        self.passage: Passage | None = None  # how slices cross that are not alike on both sides
        self.blocks = array("q", block_ids)
        self.num_layers = arena.layout.num_layers
        self.cells = bytearray(len(block_ids) * self.num_layers)

    def doubt(self, offers: Sequence[SliceOffer]) -> None:
        """These have not arrived after all."""
        for (index, layer, _, _), place in zip(offers, self.places(offers), strict=True):
            self.cells[(index - self.first) * self.num_layers + layer] = CORRUPT
            self.arena.sums.set_slice(place // self.arena.slice_bytes, 0)

    # The two loops below run once per slice: they call as little as they can.

    def places(self, offers: Sequence[SliceOffer]) -> list[int]:
        """Where in the arena each goes. ProtocolError if one of them is not expected."""
        arena, blocks, first, layers = self.arena, self.blocks, self.first, self.num_layers
        rows, block_bytes, size = len(blocks), arena.block_bytes, arena.slice_bytes
        places = []
        for index, layer, _, _ in offers:
            row = index - first
            if not (0 <= row < rows and 0 <= layer < layers):
                raise ProtocolError(
                    f"slice (index {index}, layer {layer}) is outside what is expected:"
                    f" indices {first} to {first + rows - 1}, layers 0 to {layers - 1}"
                )
            if blocks[row] == NOWHERE:
                raise ProtocolError(f"slice (index {index}, layer {layer}) is others' to get")
            places.append(blocks[row] * block_bytes + layer * size)
        return places

    def verify(
        self, offers: Sequence[SliceOffer], places: Sequence[int], takes_unnamed: bool = False
    ) -> int:
        """Hashes the slices where they lie, and tells how many are not what their sender named; one
        that has no sum is, if `takes_unnamed`."""
        buffer, size, remember = (
            self.arena.buffer,
            self.arena.slice_bytes,
            self.arena.sums.set_slice,
        )
        cells, first, layers = self.cells, self.first, self.num_layers
        pieces = () if self.passage is None else self.passage.pieces
        # A sum is remembered of all that this arena keeps of a slice.
        whole = not pieces or self.arena.cut is not None
        num_corrupt = 0
        for (index, layer, _, named), place in zip(offers, places, strict=True):
            if pieces:
                parts = [buffer[place + to : place + to + n] for _, to, n in pieces]
                checksum = checksum_slice(memoryview(b"".join(parts)))
            else:
                checksum = checksum_slice(buffer[place : place + size])
            same = checksum == named or (takes_unnamed and not named)
            cells[(index - first) * layers + layer] = VERIFIED if same else CORRUPT
            remember(place // size, checksum if same and whole else 0)
            num_corrupt += not same
        return num_corrupt
