"""Keeps the KVCache on the GPU and the arena in host memory saying the same.

The engine computes in GPU blocks; the messenger moves the arena's blocks of the same ids. Owns the
copies between them, and the knowledge of which GPU blocks are behind. Two rules:

* What a step completes is in the arena before anyone is told of it: complete blocks before the step
  ends, and, where layers are announced, each layer's slices before its announcement.
* What the messenger may have written into the arena is loaded before a step first reads it. The
  driver says so with `arriving`, before the messenger begins.

Never decides what is computed or sent. Where the engine's blocks are host memory too (in tests),
the same copies are made at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moonpool.engine.ops import KvCache
from moonpool.engine.step import LayerDone, SequenceStep


def lock_pages(arena: Tensor) -> bool:
    """Page-locks host memory for the rest of the process, so that copies need no detour and run
    beside the kernels. False where the system will not have it."""
    size = arena.numel() * arena.element_size()
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size, 0)
    return int(status) == 0


class Mirror:
    """Of `cache`, in `arena` [num_blocks, num_layers, slice_elements], which should be page-locked:
    the copies are right without, but wait for each other."""

    def __init__(self, cache: KvCache, arena: Tensor) -> None:
        if arena.shape != cache.blocks.shape or arena.dtype != cache.blocks.dtype:
            raise ValueError("the arena and the engine's blocks must have one shape and dtype")
        self._gpu, self._arena = cache.blocks, arena
        self._layout = cache.layout
        self._behind: set[int] = set()
        self._done: list[int] = []
        self._events: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        if cache.blocks.is_cuda:
            self._stream = torch.cuda.Stream(cache.blocks.device)

    def arriving(self, block_ids: Iterable[int]) -> None:
        """The messenger is about to write these blocks of the arena."""
        self._behind.update(block_ids)

    def begin(self, sequences: Sequence[SequenceStep], announced: bool) -> LayerDone | None:
        """Loads what the step reads, and returns what to call once a layer's work is queued."""
        self._load(sequences)
        self._done = self._completed(sequences, tails=announced)
        self._events = []
        return self._save_layer if announced else None

    def end(self, on_layer: LayerDone | None) -> None:
        """Waits for the copies; announces each layer as its own have arrived."""
        if on_layer is None:
            self._save(self._done, slice(None))
        for layer in range(self._layout.num_layers if on_layer is not None else 0):
            if self._events:
                self._events[layer].synchronize()
            assert on_layer is not None
            on_layer(layer)
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.current_stream(self._gpu.device).synchronize()

    def _save_layer(self, layer: int) -> None:
        self._save(self._done, layer)
        if self._stream is not None:
            self._events.append(self._stream.record_event())

    def _save(self, block_ids: Sequence[int], layers: int | slice) -> None:
        """Copies after all that is queued on the engine's stream; each copy is contiguous."""
        if self._stream is None:
            for block_id in block_ids:
                self._arena[block_id, layers] = self._gpu[block_id, layers]
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu.device))
        with torch.cuda.stream(self._stream):
            for block_id in block_ids:
                self._arena[block_id, layers].copy_(self._gpu[block_id, layers], non_blocking=True)

    def _load(self, sequences: Sequence[SequenceStep]) -> None:
        """On the engine's stream, so that whatever the step does comes after."""
        if not self._behind:
            return
        size = self._layout.block_tokens
        for sequence in sequences:
            end = sequence.start + len(sequence.new_token_ids)
            for index, block_id in enumerate(sequence.block_ids[: self._layout.blocks_for(end)]):
                if block_id not in self._behind:
                    continue
                self._behind.discard(block_id)
                if index * size < sequence.start:  # else the step writes all that is ever read
                    self._gpu[block_id].copy_(self._arena[block_id], non_blocking=True)

    def _completed(self, sequences: Sequence[SequenceStep], tails: bool) -> list[int]:
        """Blocks that end full, and with `tails` also those that the step leaves part full."""
        size = self._layout.block_tokens
        done: list[int] = []
        for sequence in sequences:
            end = sequence.start + len(sequence.new_token_ids)
            last = self._layout.blocks_for(end) if tails else end // size
            done += sequence.block_ids[sequence.start // size : last]
        return done
