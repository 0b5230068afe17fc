"""How slices get from one arena to another, and get their checksums: on the way.

`PlainMover` is what every machine can do. `native_mover` does the same in C++, in one pass over the
memory; the same tests run with both.
"""

from __future__ import annotations

from typing import Protocol

from moonpool.messenger.arena import Arena, ArenaError
from moonpool.messenger.landing import GROUP_BYTES
from moonpool.messenger.landing_table import Checksum, LandingTable, checksum_slice
from moonpool.messenger.peer_arena import PeerArena
from moonpool.messenger.transport import FrameSocket, ProtocolError
from moonpool.messenger.wire import OFFER, unpack_offers


class Mover(Protocol):
    """Offers are packed (`wire.OFFER`). What takes slices returns how many are not what was named.
    Each call ends by its deadline with a TransportError. Thread-safe."""

    group_bytes: int
    """To be taken with one call at most."""

    def name(self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int) -> int:
        """Fills the checksums of our own slices in, of the offers number `start` to `end` - 1: that
        which is remembered, or the hash of the bytes, which is remembered from now on. Returns
        where it stopped: at the end, or when `most_bytes` had been hashed. If that is 0 nothing is
        hashed, and what is not remembered stays 0."""
        ...

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        """The message `body`, and behind it the bytes of the slices it offers."""
        ...

    def receive(
        self, frames: FrameSocket, offers: bytes, table: LandingTable, deadline_s: float
    ) -> int: ...

    def copy(self, source: PeerArena, offers: bytes, table: LandingTable) -> int:
        """Slices without a sum are taken as they are, and summed."""
        ...


class PlainMover:
    """Moves with the kernel's and numpy's copies, then hashes what has been moved while it is in
    the cache. Both release the GIL."""

    group_bytes = GROUP_BYTES

    def __init__(self, checksum: Checksum = checksum_slice) -> None:
        self._checksum = checksum

    def name(self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int) -> int:
        hashed_bytes = 0
        for number in range(start, end):
            index, layer, block_id, _ = OFFER.unpack_from(offers, number * OFFER.size)
            checksum = arena.sums.get(block_id, layer)
            if not checksum and most_bytes:
                checksum = self._checksum(arena.slice(block_id, layer))
                arena.sums.set(block_id, layer, checksum)
                hashed_bytes += arena.slice_bytes
            OFFER.pack_into(offers, number * OFFER.size, index, layer, block_id, checksum)
            if most_bytes and hashed_bytes >= most_bytes:
                return number + 1
        return end

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        slices = [arena.slice(block_id, layer) for _, layer, block_id, _ in unpack_offers(offers)]
        frames.send_frame(body, deadline_s, slices)

    def receive(
        self, frames: FrameSocket, offers: bytes, table: LandingTable, deadline_s: float
    ) -> int:
        arena, unpacked = table.arena, unpack_offers(offers)
        size, places = arena.slice_bytes, table.places(unpacked)
        targets: list[memoryview] = []
        if table.passage is not None:
            pieces = table.passage.pieces
            targets = [arena.buffer[p + to : p + to + n] for p in places for _, to, n in pieces]
            frames.receive_into(targets, deadline_s)
            return table.verify(unpacked, places)
        start = end = places[0]
        for place in places:
            if place != end:  # neighbours are received as one
                targets.append(arena.buffer[start:end])
                start = place
            end = place + size
        targets.append(arena.buffer[start:end])
        frames.receive_into(targets, deadline_s)
        return table.verify(unpacked, places)

    def copy(self, source: PeerArena, offers: bytes, table: LandingTable) -> int:
        arena, unpacked = table.arena, unpack_offers(offers)
        places, size, crossing = table.places(unpacked), arena.slice_bytes, table.passage
        try:
            sources = source.places(unpacked, None if crossing is None else crossing.source_bytes)
        except ArenaError as error:
            raise ProtocolError(f"cannot read the peer's arena: {error}") from error
        if crossing is not None:
            for begin, goal in zip(sources, places, strict=True):
                for at, to, num_bytes in crossing.pieces:
                    source.copy(begin + at, arena, goal + to, num_bytes)
            return table.verify(unpacked, places)
        start, target, length = sources[0], places[0], 0
        for place, goal in zip(sources, places, strict=True):
            if place != start + length or goal != target + length:
                source.copy(start, arena, target, length)
                start, target, length = place, goal, 0
            length += size  # neighbours on both sides are copied as one
        source.copy(start, arena, target, length)
        return table.verify(unpacked, places, takes_unnamed=True)
