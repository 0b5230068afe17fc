"""Keeps the KVCache on the GPU and the arena in host memory saying the same.

The engine computes in GPU blocks; the messenger moves the arena's blocks of the same ids. Owns the
copies between them, and the knowledge of which GPU blocks are behind. Two rules:

* What a step completes is in the arena before anyone is told of it: complete blocks before the step
  ends, and, where layers are announced, each layer's slices before its announcement.
* What the messenger may have written into the arena is loaded before a step first reads it. The
  driver says so with `arriving`, before any step that reads it is begun.

A stage has some of the layers on its GPU, and mirrors these. Never decides what is computed or
sent. Where the engine's blocks are host memory too (in tests), the same copies are made at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.engine.ops import KvCache, StepMeta, empty_cache
from moonpool.engine.step import LayerDone

log = logging.getLogger("moonpool.engine")

_Place = tuple[int, int, NDArray[np.int32]]
"""A sequence's: from which token to before which the step computes, and its blocks."""


def lock_pages(arena: Tensor) -> bool:
    """Page-locks host memory for the rest of the process, so that copies need no detour and run
    beside the kernels. False where the system will not have it."""
    size = arena.numel() * arena.element_size()
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size, 0)
    return int(status) == 0


def mirrored(arena: KvCache, device: torch.device, layers: range | None = None) -> Mirror:
    """Blocks on `device` for each of the arena's (for its slices of `layers`), and their mirror."""
    if device.type == "cuda" and not lock_pages(arena.blocks):
        log.warning("the arena cannot be page-locked: copies between it and the GPU are slow")
    cache = empty_cache(arena.layout, len(arena.blocks), device, layers)
    return Mirror(cache, arena.blocks)


class Mirror:
    """Of `cache`, in `arena` [num_blocks, num_layers, slice_elements], which should be page-locked:
    the copies are right without, but wait for each other."""

    def __init__(self, cache: KvCache, arena: Tensor) -> None:
        first, count = cache.first_layer, cache.blocks.shape[1]
        own = arena[:, first : first + count]
        if own.shape != cache.blocks.shape or own.dtype != cache.blocks.dtype:
            raise ValueError("the arena and the engine's blocks must have one shape and dtype")
        self.cache = cache
        self._gpu, self._arena = cache.blocks, own
        self._layout = cache.layout
        self._first_layer = first
        self._behind: set[int] = set()
        self._done: list[int] = []
        self._events: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        if cache.blocks.is_cuda:
            self._stream = torch.cuda.Stream(cache.blocks.device)

    def arriving(self, block_ids: Iterable[int]) -> None:
        """The messenger is about to write these blocks of the arena."""
        self._behind.update(block_ids)

    def begin(self, meta: StepMeta, announced: bool) -> LayerDone | None:
        """Loads what the step reads, and returns what to call once a layer's work is queued."""
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
        """Waits for the copies; announces each layer as its own have arrived."""
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
        """Copies after all that is queued on the engine's stream; each copy is contiguous."""
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
        """On the engine's stream, so that whatever the step does comes after."""
        if not self._behind:
            return
        size = self._layout.block_tokens
        for start, end, table in places:
            for index, block_id in enumerate(table[: self._layout.blocks_for(end)].tolist()):
                if block_id not in self._behind:
                    continue
                self._behind.discard(block_id)
                if index * size < start:  # else the step writes all that is ever read
                    self._gpu[block_id].copy_(self._arena[block_id], non_blocking=True)

    def _completed(self, places: Iterable[_Place], tails: bool) -> list[int]:
        """Blocks that end full, and with `tails` also those that the step leaves part full."""
        size = self._layout.block_tokens
        done: list[int] = []
        for start, end, table in places:
            last = self._layout.blocks_for(end) if tails else end // size
            if start // size < last:
                done += table[start // size : last].tolist()
        return done
