"""Slices of a stream that are offered without their checksum, which nobody has computed yet. Within
a host who copies them sums them on the way, and tells the sum at the end: the bytes are read once,
not twice. The sender keeps them as they are until then, or closes the connection first.

Both sides note them in the order in which they were offered. A sender that is not told remembers
nothing, and hashes what it offers next time. Reads are always named: their lease may run out.
"""

from __future__ import annotations

import numpy as np

from moonpool.messenger.arena import Arena
from moonpool.messenger.landing_table import LandingTable
from moonpool.messenger.transport import ProtocolError
from moonpool.messenger.wire import MAX_TOLD_SUMS

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_OFFERS = np.dtype([("index", "<i8"), ("layer", "<i8"), ("block", "<i8"), ("sum", "<u8")])


class Unnamed:
    """Of one operation, by their numbers in `arena`: the sender's, or the receiver's. No more than
    can be told of. Used by one thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._numbers: list[Numbers] = []
        self._count = 0

    def sent(self, offers: bytes) -> None:
        """Of our own blocks."""
        found = _without_sum(offers)
        if len(found):
            self._note(found["block"] * self._arena.layout.num_layers + found["layer"])

    def landed(self, offers: bytes, table: LandingTable) -> None:
        """To where the table has them, and summed."""
        found = _without_sum(offers)
        if len(found):
            blocks = np.frombuffer(table.blocks, np.int64)
            rows = blocks[found["index"] - table.first]
            self._note(rows * table.num_layers + found["layer"])

    def sums(self) -> bytes:
        """Of what has landed, for the sender."""
        return self._arena.sums.get_many(self._all()).astype("<u8").tobytes()

    def told(self, sums: bytes) -> None:
        """What the receiver found. ProtocolError if it is more, or not what was sent."""
        numbers = self._all()
        if len(sums) != 8 * len(numbers):
            raise ProtocolError(f"{len(sums)} bytes of checksums of {len(numbers)} slices")
        self._arena.sums.set_many(numbers, np.frombuffer(sums, "<u8"))

    def _note(self, numbers: Numbers) -> None:
        numbers = numbers[: MAX_TOLD_SUMS - self._count]
        self._count += len(numbers)
        self._numbers.append(numbers)

    def _all(self) -> Numbers:
        return np.concatenate(self._numbers) if self._numbers else np.zeros(0, np.int64)


def has_unnamed(offers: bytes) -> bool:
    return len(_without_sum(offers)) > 0


def _without_sum(offers: bytes) -> np.ndarray:
    unpacked = np.frombuffer(offers, _OFFERS)
    found: np.ndarray = unpacked[unpacked["sum"] == 0]
    return found
