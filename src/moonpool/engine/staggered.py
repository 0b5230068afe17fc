"""Two halves of a batch that take turns: while one half's attention is done elsewhere, the other's
dense layers are computed here (Lamina's rotational pipelining, n = 2).

Uses the model's own cut, so that nothing of a model is written twice; rows do not see each other,
so the tokens are those of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, StepMeta
from moonpool.engine.step import BeforeAttend, LayerDone

MIN_SEQUENCES = 8
"""Fewer are not worth two passes over the weights."""


@dataclass(slots=True)
class _Half:
    meta: StepMeta
    residual: Tensor
    normed: Tensor
    q: Tensor


class StaggeredModel:
    """Steps of decodes alone are halved; others go as they are."""

    def __init__(self, model: DecoderModel, min_sequences: int = MIN_SEQUENCES) -> None:
        self._model = model
        self._min_sequences = min_sequences

    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """As `DecoderModel.forward`."""
        decodes = meta.num_rows == meta.num_sequences and wanted is not None
        decodes = decodes and len(wanted) == meta.num_rows  # type: ignore[arg-type]
        announced = on_layer is not None or before_attend is not None
        if not decodes or announced or meta.num_sequences < self._min_sequences:
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
        """Up to the first layer's attention, which is under way then."""
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
