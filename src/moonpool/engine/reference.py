"""The operations of a decoder in plain torch: the meaning every faster implementation is held to.

Rows do not see each other *by construction*: whatever adds numbers up (linears, attention) works on
tiles of one fixed shape, padded where rows are missing, and `exp` is made of single operations, so
neither the batch, nor the chunking, nor torch's choice of kernel can change a bit.
Never allocates blocks, never samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.config import Quantization
from moonpool.engine.int8 import Int8Linear
from moonpool.engine.ops import (
    SEGMENT,
    HeadShape,
    KvCache,
    Linear,
    QkNorm,
    RopeTable,
    StepMeta,
    with_quantization,
)
from moonpool.engine.slices import INNER, read_rows, write_rows

ROW_TILE = 16
KEY_TILE = 128
EMPTY = -1e30  # score of a row that has seen nothing: -inf less itself would be NaN
LN2 = (0.693359375, -2.12194440e-4)  # high and low part
EXP_TERMS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


State = tuple[Tensor, Tensor, Tensor]  # highest score, sum of weights, output times that sum


class ReferenceOps:
    """`Ops` in plain torch, for float32 and bfloat16, on any CPU."""

    name = "reference"
    inner = INNER
    device = torch.device("cpu")

    def __init__(self, quantization: Quantization = "none") -> None:
        own = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
        self.arithmetic = with_quantization(own, quantization)
        self._quantization = quantization

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._quantization == "int8":
            return Int8Linear(weight, bias)
        return _TiledLinear(weight.contiguous(), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide * scale)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1 + _exp(-gate)) * up).to(gate_up.dtype)

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
    ) -> Tensor:
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
        """q, k and v, each [T, its heads, head_dim]: normed if asked, and turned."""
        widths = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = qkv.view(meta.num_rows, -1, heads.head_dim).split_with_sizes(widths, dim=1)
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        positions = meta.positions.long()
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def attend(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        out = torch.empty_like(q)
        starts = meta.row_starts.tolist()
        for s, context in enumerate(meta.context_starts.tolist()):
            first, last = starts[s], starts[s + 1]
            if first == last:
                continue
            k, v = read_rows(cache, layer, meta.block_tables[s], context + last - first)
            attention = SequenceAttention(k.float(), v.float(), heads, scale)
            out[first:last] = attention.rows(q[first:last], context)
        return out.flatten(1)


class _TiledLinear:
    """Multiplies `ROW_TILE` rows at a time, always that many."""

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

    k, v: [context, kv_heads, head_dim] float32. Only the products need tiles of one shape: what is
    done to single elements is done to all row tiles at once.
    """

    def __init__(self, k: Tensor, v: Tensor, heads: HeadShape, scale: float) -> None:
        self._heads = heads
        self._group = heads.num_heads // heads.num_kv_heads
        self._scale = scale
        missing = -k.shape[0] % KEY_TILE
        shape = (-1, KEY_TILE, heads.num_kv_heads, heads.head_dim)
        # [tiles, kv_heads, head_dim, KEY_TILE] and [tiles, kv_heads, KEY_TILE, head_dim]
        self._k = F.pad(k, (0, 0, 0, 0, 0, missing)).view(shape).permute(0, 2, 3, 1).contiguous()
        self._v = F.pad(v, (0, 0, 0, 0, 0, missing)).view(shape).permute(0, 2, 1, 3).contiguous()

    def rows(self, q: Tensor, first_position: int) -> Tensor:
        """q [T, num_heads, head_dim], its first row at `first_position` -> the same shape."""
        tiles, positions = self._row_tiles(q), self._positions(q, first_position)
        state = self._walk(tiles, positions, 0)
        for segment in range(1, -(-len(self._k) * KEY_TILE // SEGMENT)):
            state = fold(state, self._walk(tiles, positions, segment))
        _, total, out = state
        return self._merged(out / total)[: q.shape[0]].to(q.dtype)

    def partials(self, q: Tensor, first_position: int, segment: int) -> Tensor:
        """Of one segment: [T, num_heads, head_dim + 2] float32, see `SplitOps`."""
        tiles, positions = self._row_tiles(q), self._positions(q, first_position)
        best, total, out = self._walk(tiles, positions, segment)
        best = best.masked_fill(best <= EMPTY, -torch.inf)
        return self._merged(torch.cat((best, total, out), dim=-1))[: q.shape[0]]

    def _positions(self, q: Tensor, first_position: int) -> Tensor:
        """Of the rows of every row tile, those of the padding too."""
        num_tiles = -(-q.shape[0] // ROW_TILE)
        positions = torch.arange(first_position, first_position + num_tiles * ROW_TILE)
        return positions.repeat_interleave(self._group).view(num_tiles, 1, -1, 1)

    def _walk(self, tiles: Tensor, positions: Tensor, segment: int) -> State:
        best = torch.full((*tiles.shape[:3], 1), EMPTY)
        total = torch.zeros_like(best)
        out = torch.zeros_like(tiles)
        first = segment * (SEGMENT // KEY_TILE)
        for key_tile in range(first, min(first + SEGMENT // KEY_TILE, len(self._k))):
            k, v = self._k[key_tile], self._v[key_tile]
            keys = torch.arange(key_tile * KEY_TILE, (key_tile + 1) * KEY_TILE)
            scores = torch.stack([torch.bmm(tile, k) for tile in tiles])
            scores.masked_fill_(keys > positions, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, fade = _exp(scores - new_best), _exp(best - new_best)
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
        """The way back: [tiles * ROW_TILE, num_heads, width]."""
        kv_heads, width = self._heads.num_kv_heads, tiles.shape[-1]
        apart = tiles.view(-1, kv_heads, ROW_TILE, self._group, width).permute(0, 2, 1, 3, 4)
        return apart.reshape(-1, self._heads.num_heads, width)


def fold(state: State, later: State) -> State:
    """Highest score, sum and output of two runs of tokens together. Exact where one is empty."""
    best, total, out = state
    later_best, later_total, later_out = later
    now = torch.maximum(best, later_best)
    fade, later_fade = _exp(best - now), _exp(later_best - now)
    total = total * fade + later_total * later_fade
    return now, total, out * fade + later_out * later_fade


def places(meta: StepMeta, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Block and offset in it of every row."""
    counts = meta.row_starts.diff().long()
    sequences = torch.arange(meta.num_sequences).repeat_interleave(counts)
    positions = meta.positions.long()
    blocks = meta.block_tables[sequences, positions // block_tokens]
    return blocks, positions % block_tokens


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) in float32. x [T, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _exp(x: Tensor) -> Tensor:
    """exp of float32, right to 1e-7 relative, exactly 0 below -87, finite above 88.

    torch's own elementwise functions are no use here: their bits depend on where in the tensor an
    element lies (vector body or scalar tail) and on how many threads share it. Multiplications and
    additions one by one are rounded alike everywhere.
    """
    kept = x.clamp(-87.0, 88.0)
    powers = (kept * 1.4426950408889634).round_()
    rest = kept - powers * LN2[0] - powers * LN2[1]
    terms = rest * 1.9875691500e-4
    for term in EXP_TERMS:
        terms = (terms + term) * rest
    scale = ((powers.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, (terms * rest + rest + 1.0) * scale)
