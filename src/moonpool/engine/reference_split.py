"""`SplitOps` in plain torch: what the split operations of faster implementations must mean."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moonpool.engine.ops import SEGMENT, HeadShape, KvCache, QkNorm, RopeTable, StepMeta
from moonpool.engine.reference import EMPTY, ReferenceOps, SequenceAttention, fold, places
from moonpool.engine.slices import read_rows, write_rows


class ReferenceSplitOps(ReferenceOps):
    """See `engine.ops.SplitOps`."""

    def rope(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.rotated(qkv, heads, rope, qk_norm, meta)
        return q, torch.cat((k, v), dim=1)

    def store(
        self, kv: Tensor, heads: HeadShape, cache: KvCache, layer: int, meta: StepMeta
    ) -> None:
        k, v = kv.chunk(2, dim=1)
        block_ids, offsets = places(meta, cache.layout.block_tokens)
        write_rows(cache, layer, block_ids, offsets, k, v)

    def attend_old(
        self, q: Tensor, heads: HeadShape, cache: KvCache, layer: int, meta: StepMeta, scale: float
    ) -> Tensor:
        return torch.empty(0)  # nothing is done early: this is the meaning, not the speed

    def attend_new(
        self,
        q: Tensor,
        state: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        return self.attend(q, heads, cache, layer, meta, scale)

    def attend_segments(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
        segments: Tensor,
    ) -> Tensor:
        partials = torch.empty(meta.num_rows, heads.num_heads, heads.head_dim + 2)
        starts = meta.row_starts.tolist()
        for s, context in enumerate(meta.context_starts.tolist()):
            first, last, segment = starts[s], starts[s + 1], int(segments[s])
            end = min(context + last - first, (segment + 1) * SEGMENT)
            k, v = read_rows(cache, layer, meta.block_tables[s], max(end, 0))
            # What lies before the segment is not looked at, and may be in blocks that are not here.
            k, v = k.float(), v.float()
            k[: segment * SEGMENT] = 0
            v[: segment * SEGMENT] = 0
            attention = SequenceAttention(k, v, heads, scale)
            partials[first:last] = attention.partials(q[first:last], context, segment)
        return partials

    def merge(self, partials: Tensor, order: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        bounds = starts.tolist()
        out = torch.zeros(len(bounds) - 1, partials.shape[1], partials.shape[2] - 2)
        for row, (first, end) in enumerate(pairwise(bounds)):
            state = None
            for index in order[first:end].tolist():
                best, total, sums = partials[index].split_with_sizes((1, 1, out.shape[2]), dim=-1)
                part = (best.clamp(min=EMPTY), total, sums)
                state = part if state is None else fold(state, part)
            if state is not None:
                seen = state[1] > 0
                out[row] = torch.where(seen, state[2] / state[1].where(seen, 1.0), 0.0)
        return out.flatten(1).to(dtype)
