"""Host-GPU sync: keeps the KVCache on the GPU and the arena in host memory equal.

The engine computes in GPU blocks. The messenger moves the arena's blocks of the same ids. This
module copies between the two and tracks which GPU blocks are stale. Two rules hold:

* A step's result is in the arena before it is reported: complete blocks before the step ends, and
  with announced layers each layer's slices before its announcement.
* Blocks that the messenger may have written are loaded before a step first reads them. The driver
  names them with `arriving`, before it begins a step that reads them.

A pipeline stage syncs only its own layers. If the engine's blocks are host memory too (in tests),
the copies are made at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool_engine.engine.ops import KvCache, StepMeta, empty_cache
from moonpool_engine.engine.step import LayerDone

log = logging.getLogger("moonpool_engine.engine")

_Place = tuple[int, int, NDArray[np.int32]]
"""One sequence: the first computed token, the end of the computed tokens, the block table."""


def lock_pages(arena: Tensor) -> bool:
    """Page-locks host memory for the lifetime of the process. Returns False if the system refuses.

    Copies of page-locked memory need no staging buffer and overlap with kernels.
    """
    size = arena.numel() * arena.element_size()
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size, 0)
    return int(status) == 0


def make_host_sync(
    arena: KvCache, device: torch.device, layers: range | None = None
) -> HostGpuSync:
    """Allocates GPU blocks for the arena's `layers` (default: all) and returns their sync."""
    if device.type == "cuda" and not lock_pages(arena.blocks):
        log.warning("the arena cannot be page-locked: copies between it and the GPU are slow")
    cache = empty_cache(arena.layout, len(arena.blocks), device, layers)
    return HostGpuSync(cache, arena.blocks)


class HostGpuSync:
    """The sync between `cache` and `arena` [num_blocks, num_layers, slice_elements].

    The arena should be page-locked; otherwise copies do not overlap.
    """

    def __init__(self, cache: KvCache, arena: Tensor) -> None:
        first, count = cache.first_layer, cache.blocks.shape[1]
        own = arena[:, first : first + count]
        if own.shape != cache.blocks.shape or own.dtype != cache.blocks.dtype:
            raise ValueError("the arena and the engine's blocks must have one shape and dtype")
        self.cache = cache
        self._gpu, self._arena = cache.blocks, own
        self._layout = cache.layout
        self._first_layer = first
        self._stale: set[int] = set()
        self._done: list[int] = []
        self._events: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        if cache.blocks.is_cuda:
            self._stream = torch.cuda.Stream(cache.blocks.device)

    def arriving(self, block_ids: Iterable[int]) -> None:
        """Announces that the messenger is about to write these blocks of the arena."""
        self._stale.update(block_ids)

    def begin(self, meta: StepMeta, announced: bool) -> LayerDone | None:
        """Loads the stale blocks that the step reads. Returns a function to call once a layer's
        kernels are queued, or None if layers are not announced."""
        starts = meta.context_starts.tolist()
        counts = meta.row_starts.diff().tolist()
        tables = meta.block_tables.numpy()
        places = [
            (start, start + count, table)
            for start, count, table in zip(starts, counts, tables, strict=True)
        ]
        self._load(places)
        self._done = self._completed(places, tails=announced)
        self._events = []
        return self._save_layer if announced else None

    def end(self, on_layer: LayerDone | None) -> None:
        """Waits for the copies, and announces each layer once its copies are complete."""
        if on_layer is None:
            self._save(self._done, slice(None))
        else:
            for place in range(self._gpu.shape[1]):
                if self._events:
                    self._events[place].synchronize()
                on_layer(self._first_layer + place)
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.current_stream(self._gpu.device).synchronize()

    def _save_layer(self, layer: int) -> None:
        self._save(self._done, layer - self._first_layer)
        if self._stream is not None:
            self._events.append(self._stream.record_event())

    def _save(self, block_ids: Sequence[int], places: int | slice) -> None:
        """Copies to the arena after the work queued on the engine's stream. Each copy covers
        contiguous memory."""
        if self._stream is None:
            for block_id in block_ids:
                self._arena[block_id, places] = self._gpu[block_id, places]
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu.device))
        with torch.cuda.stream(self._stream):
            for block_id in block_ids:
                there, here = self._arena[block_id, places], self._gpu[block_id, places]
                there.copy_(here, non_blocking=True)

    def _load(self, places: Iterable[_Place]) -> None:
        """Copies from the arena on the engine's stream, ahead of the step's kernels."""
        if not self._stale:
            return
        size = self._layout.block_tokens
        for start, end, table in places:
            for index, block_id in enumerate(table[: self._layout.blocks_for(end)].tolist()):
                if block_id not in self._stale:
                    continue
                self._stale.discard(block_id)
                # otherwise the step writes the whole block before it is read
                if index * size < start:
                    self._gpu[block_id].copy_(self._arena[block_id], non_blocking=True)

    def _completed(self, places: Iterable[_Place], tails: bool) -> list[int]:
        """Returns the blocks that the step fills; with `tails`, also those that it leaves partly
        filled."""
        size = self._layout.block_tokens
        done: list[int] = []
        for start, end, table in places:
            last = self._layout.blocks_for(end) if tails else end // size
            if start // size < last:
                done += table[start // size : last].tolist()
        return done
