"""Decode steps as CUDA graphs: one launch for all kernels of a step instead of hundreds.

A graph is recorded once per padded batch size and number of key runs, and replayed with new
contents in its tensors. Padding rows have position -1, so they write nothing, and rows are
independent, so they change no other row. Prefills, mixed steps and steps with announced layers run
without graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moonpool_engine.engine.cuda.torch_ops import DeviceStep
from moonpool_engine.engine.cuda.triton_ops import SPLIT, Tiles, TritonOps
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, StepMeta
from moonpool_engine.engine.step import BeforeAttend, LayerDone

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class _Recorded:
    """A graph and all tensors it reads and writes. The graph holds only addresses, so the tensors
    must live as long as the graph."""

    graph: torch.cuda.CUDAGraph
    token_ids: Tensor  # [batch] int64
    tiles: Tiles  # the tiles with positions [batch] int32, -1 in padding rows
    logits: Tensor  # [batch, vocab] float32


class GraphedModel:
    """A `DecoderModel` whose decode steps are replayed from CUDA graphs."""

    def __init__(self, model: DecoderModel, ops: TritonOps) -> None:
        self._model = model
        self._ops = ops
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool: Any = None  # memory pool that all graphs share, because only one runs at a time

    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """Like `DecoderModel.forward`."""
        rows = meta.num_rows
        decodes = wanted is not None and rows == meta.num_sequences == len(wanted)
        announced = on_layer is not None or before_attend is not None
        if not decodes or announced or rows > BATCHES[-1]:
            return self._model.forward(token_ids, cache, meta, wanted, on_layer, before_attend)
        batch = next(size for size in BATCHES if size >= rows)
        runs = triton.cdiv(int(meta.positions.max()) + 1, SPLIT)
        key = (batch, triton.next_power_of_2(runs))
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(*key, cache)
        positions = torch.full((batch,), -1, dtype=torch.int32)
        positions[:rows] = meta.positions
        step = recorded.tiles.step
        step.positions.copy_(positions)
        recorded.token_ids[:rows].copy_(token_ids)
        step.block_tables[:rows, : meta.block_tables.shape[1]].copy_(meta.block_tables)
        recorded.graph.replay()
        return recorded.logits[:rows].clone()

    def _record(self, batch: int, runs: int, cache: KvCache) -> _Recorded:
        device = self._ops.device
        width = cache.layout.blocks_for(self._model.spec.max_positions)
        token_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        positions = torch.full((batch,), -1, dtype=torch.int32, device=device)
        block_tables = torch.zeros(batch, width, dtype=torch.int32, device=device)
        each = torch.arange(batch + 1, dtype=torch.int32, device=device)
        meta = StepMeta(positions, each, positions, block_tables, batch, batch)
        step = DeviceStep(
            meta, positions, each[:-1], each, positions, block_tables, [1] * batch, [0] * batch
        )
        firsts = torch.zeros(batch, dtype=torch.int32, device=device)
        tiles = Tiles(step, each[:-1], firsts, batch, runs)
        self._ops.adopt(tiles)
        args = (token_ids, cache, meta, each[:-1])
        # compiles missing kernels first, because compiling cannot be recorded
        self._model.forward(*args)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model.forward(*args)
        assert logits is not None
        self._pool = graph.pool()
        return _Recorded(graph, token_ids, tiles, logits)
