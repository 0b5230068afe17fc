"""Staggered decoding for attention offloading (Lamina's rotational pipelining with n = 2).

A decode batch is split into two halves. While attention workers compute one half's attention, this
process computes the other half's dense layers. Each half batch uses the model's own parts of a
layer. No row depends on another row, so the tokens are the same as in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, StepMeta
from moonpool_engine.engine.step import BeforeAttend, LayerDone

MIN_SEQUENCES = 8
"""The smallest batch to split: smaller ones do not pay for two passes over the weights."""


@dataclass(slots=True)
class _Half:
    """Half a batch of S sequences. residual, normed: [S, hidden]; q: [S, heads, head_dim]."""

    meta: StepMeta
    residual: Tensor
    normed: Tensor
    q: Tensor


class StaggeredModel:
    """Splits steps that contain only decodes; runs other steps unchanged."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

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
        decodes = meta.num_rows == meta.num_sequences and wanted is not None
        decodes = decodes and len(wanted) == meta.num_rows  # type: ignore[arg-type]
        announced = on_layer is not None or before_attend is not None
        if not decodes or announced or meta.num_sequences < MIN_SEQUENCES:
            return self._model.forward(token_ids, cache, meta, wanted, on_layer, before_attend)
        model, middle = self._model, meta.num_sequences // 2
        ranges = ((0, middle), (middle, meta.num_sequences))
        halves = [self._begin(token_ids, cache, meta, *bounds) for bounds in ranges]
        last = model.spec.num_layers - 1
        for layer in range(last + 1):
            for half in halves:
                attention = model.attend(layer, half.q, cache, half.meta)
                half.normed = model.output(layer, attention, half.residual)
                if layer < last:
                    qkv = model.qkv(layer + 1, half.normed)
                    half.q = model.store(layer + 1, qkv, cache, half.meta)
        return torch.cat([model.logits(half.normed) for half in halves])

    def _begin(
        self, token_ids: Tensor, cache: KvCache, meta: StepMeta, first: int, end: int
    ) -> _Half:
        """Runs sequences first .. end - 1 up to the first layer's attention, and starts that."""
        own = StepMeta(
            positions=meta.positions[first:end].contiguous(),
            row_starts=torch.arange(end - first + 1, dtype=torch.int32),
            context_starts=meta.context_starts[first:end].contiguous(),
            block_tables=meta.block_tables[first:end].contiguous(),
            num_rows=end - first,
            num_sequences=end - first,
        )
        model = self._model
        residual, normed = model.embed(token_ids[first:end])
        q = model.store(0, model.qkv(0, normed), cache, own)
        return _Half(own, residual, normed, q)
