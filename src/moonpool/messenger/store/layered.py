"""A load that comes layer by layer: in parts, each some layers of all its blocks, so that a prefill
computes with the first layers while the others are read (Mooncake 5.2).

Decides nothing, and moves nothing itself: `cut` says which layers are a part, `Layers` keeps what
the parts of one load must know of each other, and `Told` passes on how far it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.kvcache.transfers import LoadProgress, MessengerEvent
from moonpool.messenger.gate import PROGRESS_PARTS, LayerGate
from moonpool.messenger.store.format import PAGE_BYTES, Geometry, SlotHeader
from moonpool.messenger.store.job import Job

MIN_PART_BYTES = 512 << 10
"""Of a block: a disk that is read in smaller pieces is slower than one that is read whole."""
_LOOK_S = 1.0


class Part(NamedTuple):
    """Layers `first` to before `end`."""

    first: int
    end: int


def cut(geometry: Geometry) -> tuple[Part, ...]:
    """The parts of each block, alike as far as may be. Blocks of whole pages are cut at pages."""
    layers, size = geometry.num_layers, geometry.slice_bytes
    num_parts = max(1, min(PROGRESS_PARTS, layers, geometry.block_bytes // MIN_PART_BYTES))
    ends = [layers * (part + 1) // num_parts for part in range(num_parts)]
    if not geometry.padding_bytes:
        ends = [end for end in ends if end * size % PAGE_BYTES == 0]
    return tuple(Part(first, end) for first, end in zip([0, *ends], ends, strict=False))


class Layers:
    """Of one load. The header of a block, which says what its slices should be, comes with its
    first part; whoever has read a later one before waits for it. Thread-safe."""

    def __init__(self, num_blocks: int, starts: Sequence[int]) -> None:
        """`starts`: the first block of each group."""
        self.headers: list[SlotHeader | None] = [None] * num_blocks
        self._read = {start: threading.Event() for start in starts}

    def headers_read(self, start: int) -> None:
        """Of the group that begins there; or they never will be."""
        self._read[start].set()

    def await_headers(self, start: int, job: Job) -> None:
        """The first part of a group is taken up before its others, so this ends when that does."""
        while not self._read[start].wait(_LOOK_S) and not job.ended:
            pass


class Told:
    """Opens the gate and posts LoadProgress; for the last layers only the end does (`ended`)."""

    def __init__(
        self,
        load_id: str,
        parts: Sequence[Part],
        gate: LayerGate,
        post: Callable[[MessengerEvent], None],
    ) -> None:
        self._load_id = load_id
        self._parts = parts
        self._gate = gate
        self._post = post

    def parts(self, num_parts: int, seconds: float) -> None:
        num_layers = self._parts[num_parts - 1].end if num_parts else 0
        self._gate.open(num_layers)
        self._post(LoadProgress(self._load_id, num_layers, seconds))

    def broken(self) -> None:
        self._gate.break_off()
