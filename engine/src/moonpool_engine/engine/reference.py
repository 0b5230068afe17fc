"""The operations of a decoder in plain torch: the reference for every faster implementation.

Rows are independent by construction. Every sum (linears, attention) runs over tiles of one fixed
shape, padded where rows are missing, and `exp` consists of single operations. So no bit depends on
the batch, on the chunks, or on torch's choice of kernel.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool_engine.engine.delta.reference import delta_rows
from moonpool_engine.engine.exponential import exp
from moonpool_engine.engine.ops import (
    PLAIN,
    SEGMENT,
    SILU,
    AttendArgs,
    AttendRule,
    DeltaArgs,
    DeltaWeights,
    Gate,
    HeadShape,
    Linear,
    QkNorm,
    RopeTable,
    StepMeta,
    with_quantization,
)
from moonpool_engine.engine.quantized.int8 import Int8Linear
from moonpool_engine.engine.quantized.linear import QuantizedLinear
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix
from moonpool_engine.engine.quantized.rounding import rounded_to_int4
from moonpool_engine.engine.slices import INNER, read_rows, write_rows

ROW_TILE = 16
KEY_TILE = 128
EMPTY = -1e30  # best score of a row without keys, because -inf minus itself would be NaN
GELU = 2 * (2 / torch.pi) ** 0.5  # gelu(x) is about x * sigmoid(GELU * (x + 0.044715 x^3))


State = tuple[Tensor, Tensor, Tensor]  # (highest score, sum of weights, output times that sum)


class ReferenceOps:
    """`Ops` in plain torch, for float32 and bfloat16, on any CPU."""

    name = "reference"
    inner = INNER
    without: frozenset[str] = frozenset()
    device = torch.device("cpu")

    def __init__(self, quantization: Quantization = "none") -> None:
        own = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
        self.arithmetic = with_quantization(own, quantization)
        self._quantization = quantization

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        if self._quantization == "int4" and isinstance(weight, Tensor):
            weight = rounded_to_int4(weight)
        if isinstance(weight, QuantizedMatrix):
            return QuantizedLinear(weight, bias)
        if self._quantization == "int8":
            return Int8Linear(weight, bias)
        return _TiledLinear(weight.contiguous(), bias)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return _TiledLinear(weight.contiguous(), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide * scale)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def glu(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        x, up = gate_up.float().chunk(2, dim=-1)
        steep = x
        if gate.kind == "gelu_tanh":
            steep = GELU * (x + 0.044715 * x * x * x)
        elif gate.kind == "clamped":
            x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit) + 1
            steep = x * gate.alpha
        return (x / (1 + exp(-steep)) * up).to(gate_up.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return _soft_cap(x, cap)

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        heads, cache, layer, meta, *_ = args
        q, k, v = self.rotated(qkv, heads, rope, qk_norm, meta)
        block_ids, offsets = places(meta, cache.layout.block_tokens)
        write_rows(cache, layer, block_ids, offsets, k, v)
        return q

    def rotated(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], normed and
        rotated."""
        values = 0 if heads.latent_dim else heads.num_kv_heads
        widths = (heads.num_heads, heads.num_kv_heads, values)
        q, k, v = qkv.view(meta.num_rows, -1, heads.head_dim).split_with_sizes(widths, dim=1)
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        positions = meta.positions.long()
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        heads, cache, layer, meta, scale, rule = args
        out = q.new_empty(meta.num_rows, heads.num_heads, heads.value_dim)
        starts = meta.row_starts.tolist()
        for s, context in enumerate(meta.context_starts.tolist()):
            first, last = starts[s], starts[s + 1]
            if first == last:
                continue
            k, v = read_rows(
                cache, layer, meta.block_tables[s], context + last - first, heads.value_dim
            )
            attention = SequenceAttention(k.float(), v.float(), heads, scale, rule)
            out[first:last] = attention.rows(q[first:last], context)
        return out.flatten(1)

    def delta_rule(self, x: Tensor, weights: DeltaWeights, args: DeltaArgs) -> Tensor:
        return delta_rows(x, weights, args)


class _TiledLinear:
    """Multiplies exactly `ROW_TILE` rows at a time, padded with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
        tiles = [F.linear(tile, self._weight, self._bias) for tile in torch.split(padded, ROW_TILE)]
        return torch.cat(tiles)[:num_rows]


class SequenceAttention:
    """Online softmax of one sequence's rows over its keys, in fixed tiles counted from token 0.

    k: [context, kv_heads, head_dim], v: [context, kv_heads, value_dim], float32. Only products need
    tiles of one shape; operations on single elements run over all row tiles at once.
    """

    def __init__(
        self, k: Tensor, v: Tensor, heads: HeadShape, scale: float, rule: AttendRule = PLAIN
    ) -> None:
        self._heads = heads
        self._rule = rule
        self._group = heads.num_heads // heads.num_kv_heads
        self._scale = scale
        missing = -k.shape[0] % KEY_TILE
        shape = (-1, KEY_TILE, heads.num_kv_heads, heads.head_dim)
        values = (*shape[:3], heads.value_dim)
        # [tiles, kv_heads, head_dim, KEY_TILE] and [tiles, kv_heads, KEY_TILE, value_dim]
        self._k = F.pad(k, (0, 0, 0, 0, 0, missing)).view(shape).permute(0, 2, 3, 1).contiguous()
        self._v = F.pad(v, (0, 0, 0, 0, 0, missing)).view(values).permute(0, 2, 1, 3).contiguous()

    def rows(self, q: Tensor, first_position: int) -> Tensor:
        """Attends: q [T, num_heads, head_dim] -> [T, num_heads, value_dim]. Row 0 stands at
        `first_position`."""
        tiles, positions = self._row_tiles(q), self._positions(q, first_position)
        state = self._walk(tiles, positions, 0)
        for segment in range(1, -(-len(self._k) * KEY_TILE // SEGMENT)):
            state = fold(state, self._walk(tiles, positions, segment))
        if self._rule.sinks is not None:
            state = fold(state, self._sink_state(self._rule.sinks, state))
        _, total, out = state
        return self._merged(out / total)[: q.shape[0]].to(q.dtype)

    def partials(self, q: Tensor, first_position: int, segment: int) -> Tensor:
        """Returns the partials of one segment, [T, num_heads, value_dim + 2] float32; see
        `SplitOps`."""
        tiles, positions = self._row_tiles(q), self._positions(q, first_position)
        best, total, out = self._walk(tiles, positions, segment)
        best = best.masked_fill(best <= EMPTY, -torch.inf)
        return self._merged(torch.cat((best, total, out), dim=-1))[: q.shape[0]]

    def _sink_state(self, sinks: Tensor, like: State) -> State:
        """A token of score `sinks` and value 0 for every row."""
        rows = sinks.view(1, self._heads.num_kv_heads, 1, self._group)
        score = rows.expand(len(like[0]), -1, ROW_TILE, -1).reshape(like[0].shape)
        return score, torch.ones_like(score), torch.zeros_like(like[2])

    def _positions(self, q: Tensor, first_position: int) -> Tensor:
        """[tiles, 1, ROW_TILE * group, 1]: positions of all rows, including the padding."""
        num_tiles = -(-q.shape[0] // ROW_TILE)
        positions = torch.arange(first_position, first_position + num_tiles * ROW_TILE)
        return positions.repeat_interleave(self._group).view(num_tiles, 1, -1, 1)

    def _walk(self, tiles: Tensor, positions: Tensor, segment: int) -> State:
        best = torch.full((*tiles.shape[:3], 1), EMPTY)
        total = torch.zeros_like(best)
        out = tiles.new_zeros(*tiles.shape[:3], self._heads.value_dim)
        first = segment * (SEGMENT // KEY_TILE)
        for key_tile in range(first, min(first + SEGMENT // KEY_TILE, len(self._k))):
            k, v = self._k[key_tile], self._v[key_tile]
            keys = torch.arange(key_tile * KEY_TILE, (key_tile + 1) * KEY_TILE)
            scores = torch.stack([torch.bmm(tile, k) for tile in tiles])
            if self._rule.soft_cap:
                scores = _soft_cap(scores, self._rule.soft_cap)
            unseen = keys > positions
            if self._rule.window:
                unseen |= keys <= positions - self._rule.window
            scores.masked_fill_(unseen, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, fade = exp(scores - new_best), exp(best - new_best)
            total = total * fade + weights.sum(-1, keepdim=True)
            out = out * fade + torch.stack([torch.bmm(tile, v) for tile in weights])
            best = new_best
        return best, total, out

    def _row_tiles(self, q: Tensor) -> Tensor:
        """[T, num_heads, head_dim] -> [tiles, kv_heads, ROW_TILE * group, head_dim] float32."""
        padded = F.pad(q.float() * self._scale, (0, 0, 0, 0, 0, -q.shape[0] % ROW_TILE))
        kv_heads, head_dim = self._heads.num_kv_heads, self._heads.head_dim
        tiles = padded.view(-1, ROW_TILE, kv_heads, self._group, head_dim).permute(0, 2, 1, 3, 4)
        return tiles.reshape(-1, kv_heads, ROW_TILE * self._group, head_dim)

    def _merged(self, tiles: Tensor) -> Tensor:
        """[tiles, kv_heads, ROW_TILE * group, width] -> [tiles * ROW_TILE, num_heads, width]."""
        kv_heads, width = self._heads.num_kv_heads, tiles.shape[-1]
        apart = tiles.view(-1, kv_heads, ROW_TILE, self._group, width).permute(0, 2, 1, 3, 4)
        return apart.reshape(-1, self._heads.num_heads, width)


def fold(state: State, later: State) -> State:
    """Combines the softmax states of two runs of tokens. The result is exact if one of both states
    is empty."""
    best, total, out = state
    later_best, later_total, later_out = later
    now = torch.maximum(best, later_best)
    fade, later_fade = exp(best - now), exp(later_best - now)
    total = total * fade + later_total * later_fade
    return now, total, out * fade + later_out * later_fade


def places(meta: StepMeta, block_tokens: int) -> tuple[Tensor, Tensor]:
    """The block of every row and its offset in that block, each [T] int64."""
    counts = meta.row_starts.diff().long()
    sequences = torch.arange(meta.num_sequences).repeat_interleave(counts)
    positions = meta.positions.long()
    blocks = meta.block_tables[sequences, positions // block_tokens]
    return blocks, positions % block_tokens


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + half) in float32; elements from 2 * half on stay.

    x: [T, heads, head_dim]; cos, sin: [T, 1, half].
    """
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide.tensor_split((half, 2 * half), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return turned.to(x.dtype)


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), for float32."""
    return (2 / (1 + exp(x * (-2 / cap))) - 1) * cap


class ReferenceSplitOps(ReferenceOps):
    """`SplitOps` in plain torch."""

    # the state of linear attention is not divided among processes
    without = frozenset({"linear attention"})

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

    def store(self, kv: Tensor, args: AttendArgs) -> None:
        heads, cache, layer, meta, *_ = args
        k, v = kv.tensor_split((heads.num_kv_heads,), dim=1)
        block_ids, offsets = places(meta, cache.layout.block_tokens)
        write_rows(cache, layer, block_ids, offsets, k, v)

    def attend_old(self, q: Tensor, args: AttendArgs) -> Tensor:
        return torch.empty(0)  # the reference computes everything in `attend_new`

    def attend_new(self, q: Tensor, state: Tensor, args: AttendArgs) -> Tensor:
        return self.attend(q, args)

    def attend_segments(self, q: Tensor, segments: Tensor, args: AttendArgs) -> Tensor:
        heads, cache, layer, meta, scale, rule = args
        partials = torch.empty(meta.num_rows, heads.num_heads, heads.value_dim + 2)
        starts = meta.row_starts.tolist()
        for s, context in enumerate(meta.context_starts.tolist()):
            first, last, segment = starts[s], starts[s + 1], int(segments[s])
            end = min(context + last - first, (segment + 1) * SEGMENT)
            k, v = read_rows(cache, layer, meta.block_tables[s], max(end, 0), heads.value_dim)
            # Tokens before the segment may lie in blocks that this process does not have.
            k, v = k.float(), v.float()
            k[: segment * SEGMENT] = 0
            v[: segment * SEGMENT] = 0
            attention = SequenceAttention(k, v, heads, scale, rule)
            partials[first:last] = attention.partials(q[first:last], context, segment)
        return partials

    def merge(
        self,
        partials: Tensor,
        order: Tensor,
        starts: Tensor,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        bounds = starts.tolist()
        out = torch.zeros(len(bounds) - 1, partials.shape[1], partials.shape[2] - 2)
        for row, (first, end) in enumerate(pairwise(bounds)):
            state = None
            for index in order[first:end].tolist():
                best, total, sums = partials[index].split_with_sizes((1, 1, out.shape[2]), dim=-1)
                part = (best.clamp(min=EMPTY), total, sums)
                state = part if state is None else fold(state, part)
            if state is not None:
                if sinks is not None:
                    score = sinks.unsqueeze(1)
                    state = fold(state, (score, torch.ones_like(score), torch.zeros_like(state[2])))
                seen = state[1] > 0
                out[row] = torch.where(seen, state[2] / state[1].where(seen, 1.0), 0.0)
        return out.flatten(1).to(dtype)
