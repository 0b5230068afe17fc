"""An arena's blocks as a store moves them: their bytes, and the checksums that go with them."""

from __future__ import annotations

from moonpool.messenger.arena import Arena
from moonpool.messenger.store.format import Geometry, SlotHeader, checksum
from moonpool.types import BlockId, BlockKey


class Slices:
    """Thread-safe, as far as each block is moved by one thread at a time."""

    def __init__(self, arena: Arena, geometry: Geometry) -> None:
        self._arena = arena
        self._geometry = geometry

    def block(self, block_id: BlockId) -> memoryview:
        start = block_id * self._geometry.block_bytes
        return self._arena.buffer[start : start + self._geometry.block_bytes]

    def sums(self, block_id: BlockId) -> tuple[int, ...]:
        """Those remembered from when the block was made, where they are known: a block that changed
        in memory since is then found out when it is read back."""
        sums = self._arena.sums
        return tuple(
            sums.get(block_id, layer) or checksum(self._arena.slice(block_id, layer))
            for layer in range(self._geometry.num_layers)
        )

    def count_wrong(self, block_id: BlockId, key: BlockKey, header: SlotHeader | None) -> int:
        """Slices of the block that has just been read which are not as they were written. One, if
        what came with it does not say that it is this block: it was torn, or is another's by
        now. Remembers the sums of the right ones."""
        if header is None or header.key != key:
            return 1
        size, block = self._geometry.slice_bytes, self.block(block_id)
        found = tuple(checksum(block[at : at + size]) for at in range(0, len(block), size))
        for layer, (a, b) in enumerate(zip(found, header.checksums, strict=True)):
            if a == b:
                self._arena.sums.set(block_id, layer, a)
        return sum(a != b for a, b in zip(found, header.checksums, strict=True))
