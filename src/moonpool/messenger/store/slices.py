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

    def layers(self, block_id: BlockId, first: int, end: int) -> memoryview:
        """The block's bytes of layers `first` to before `end`."""
        size = self._geometry.slice_bytes
        return self.block(block_id)[first * size : end * size]

    def sums(self, block_id: BlockId) -> tuple[int, ...]:
        """Those remembered from when the block was made, where they are known: a block that changed
        in memory since is then found out when it is read back."""
        sums = self._arena.sums
        return tuple(
            sums.get(block_id, layer) or checksum(self._arena.slice(block_id, layer))
            for layer in range(self._geometry.num_layers)
        )

    def count_wrong(
        self,
        block_id: BlockId,
        key: BlockKey,
        header: SlotHeader | None,
        first: int = 0,
        end: int | None = None,
    ) -> int:
        """Slices of the block that has just been read, or of these layers of it, which are not as
        they were written. One, if what came with it does not say that it is this block: it was
        torn, or is another's by now. Remembers the sums of the right ones."""
        if header is None or header.key != key:
            return 1
        end = self._geometry.num_layers if end is None else end
        num_wrong = 0
        for layer in range(first, end):
            found = checksum(self._arena.slice(block_id, layer))
            if found == header.checksums[layer]:
                self._arena.sums.set(block_id, layer, found)
            else:
                num_wrong += 1
        return num_wrong
