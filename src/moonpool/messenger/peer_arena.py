"""Peers' arenas, read-only, as this process sees them: mapped once per peer and kept while any
connection to it lives.

A copy from a mapping costs what memcpy costs, where a read through the descriptor pays the kernel
for each page; but to map anew for each transfer would cost more than either. The seals that are
asked for make it safe: the file can neither shrink nor be written through the mapping, so what a
lying peer names is refused by its offset, and never raises SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger.arena import Arena, ArenaError
from moonpool.messenger.wire import SliceOffer


class PeerArena:
    """One peer's arena. Made by `PeerArenas.adopt` from the descriptor the peer handed over."""

    def __init__(self, mapping: mmap.mmap, layout: BlockLayout) -> None:
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.address: int = self._bytes.ctypes.data
        """Where the mapping begins; it lasts as long as this object."""
        self._num_layers = layout.num_layers
        self._slice_bytes = layout.slice_bytes
        self.num_blocks = len(self._bytes) // layout.block_bytes

    def places(self, offers: Sequence[SliceOffer], slice_bytes: int | None = None) -> list[int]:
        """Where the slices, of so many bytes each if not of ours, start in the peer's arena.
        ArenaError if there is no such slice."""
        layers, size = self._num_layers, slice_bytes or self._slice_bytes
        block_bytes = layers * size
        num_blocks = len(self._bytes) // block_bytes
        places = []
        for _, layer, block_id, _ in offers:
            if not (0 <= block_id < num_blocks and 0 <= layer < layers):
                raise ArenaError(f"the peer offered block {block_id} layer {layer}, which it lacks")
            places.append(block_id * block_bytes + layer * size)
        return places

    def copy(self, start: int, arena: Arena, place: int, num_bytes: int) -> None:
        """From `start` of the peer's arena to `place` of ours; the GIL is free meanwhile."""
        target = np.frombuffer(arena.buffer[place : place + num_bytes], np.uint8)
        np.copyto(target, self._bytes[start : start + num_bytes])


class PeerArenas:
    """Those in use, each mapped once however many connections there are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[tuple[int, int], int] = {}
        self._arenas: dict[tuple[int, int], PeerArena] = {}

    def adopt(self, fd: int, layout: BlockLayout) -> tuple[PeerArena, tuple[int, int]]:
        """The arena behind `fd`, which is closed, and the name under which to `release` it.
        ArenaError if it is not what a peer of ours hands over."""
        try:
            num_bytes, name = _checked(fd)
            with self._lock:
                arena = self._arenas.get(name)
                if arena is None:
                    arena = PeerArena(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), layout)
                    self._arenas[name] = arena
                self._users[name] = self._users.get(name, 0) + 1
            return arena, name
        except OSError as error:
            raise ArenaError(f"the peer's arena cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def release(self, name: tuple[int, int]) -> None:
        """Unmapped with its last user, as soon as nobody copies from it any more."""
        with self._lock:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._arenas[name]

    def __len__(self) -> int:
        return len(self._arenas)


def _checked(fd: int) -> tuple[int, tuple[int, int]]:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"the peer's arena is not a memory file: {error}") from error
    found = os.fstat(fd)
    sealed = seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW
    if not sealed or not found.st_size:
        raise ArenaError("the peer's arena is not sealed or empty")
    return found.st_size, (found.st_dev, found.st_ino)
