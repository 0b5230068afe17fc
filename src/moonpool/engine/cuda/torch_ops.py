"""The operations of a decoder on any device, by torch's own kernels.

They are the meaning that the GPU kernels (`triton_ops`) are held to, and stand in for them where
Triton is missing. torch picks its kernels by the shape of the call, so here a row's last bits *do*
depend on what shares its step: chosen tokens may differ where two candidates tie within rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.engine.cuda.slices import key_rows, value_rows
from moonpool.engine.cuda.step import DeviceStep, StepPlacer
from moonpool.engine.ops import HeadShape, KvCache, Linear, QkNorm, RopeTable, StepMeta
from moonpool.engine.slices import ROWS_INNER


class TorchOps:
    """`Ops` by torch, for float32 and bfloat16, on `device`."""

    name = "torch"
    inner = ROWS_INNER

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arithmetic = f"torch-{torch.__version__}-{device_name(device)}"
        self._placed = StepPlacer(device)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        placed = weight.to(self.device)
        placed_bias = None if bias is None else bias.to(self.device)
        return lambda x: F.linear(x, placed, placed_bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide * scale)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

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
        step = self._placed(meta)
        widths = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = qkv.view(meta.num_rows, -1, heads.head_dim).split_with_sizes(widths, dim=1)
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        positions = step.positions.long()
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        block_tokens = cache.layout.block_tokens
        blocks = step.block_tables[step.sequences.long(), positions // block_tokens].long()
        key_rows(cache, layer)[blocks, positions % block_tokens] = _rotate(k, cos, sin)
        value_rows(cache, layer)[blocks, positions % block_tokens] = v
        return _rotate(q, cos, sin)

    def attend(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        step = self._placed(meta)
        keys, values = key_rows(cache, layer), value_rows(cache, layer)
        if meta.num_rows == meta.num_sequences > 1:
            return _decode(q, keys, values, step, scale)
        out = torch.empty_like(q)
        first = 0
        for s, (count, context) in enumerate(zip(step.counts, step.contexts, strict=True)):
            table = step.block_tables[s, : cache.layout.blocks_for(context + count)].long()
            k = keys[table].flatten(0, 1)[: context + count]
            v = values[table].flatten(0, 1)[: context + count]
            out[first : first + count] = _attend(q[first : first + count], k, v, context, scale)
            first += count
        return out.flatten(1)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _attend(q: Tensor, k: Tensor, v: Tensor, context: int, scale: float) -> Tensor:
    """Rows q [T, heads, d] after `context` tokens over k, v [context + T, kv_heads, d]."""
    rows = torch.arange(context, len(k), device=q.device).unsqueeze(1)
    seen = torch.arange(len(k), device=q.device) <= rows
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode(q: Tensor, keys: Tensor, values: Tensor, step: DeviceStep, scale: float) -> Tensor:
    """One row of each sequence: q [S, heads, d] -> [S, heads * d]. Gathers what all may see."""
    tables = step.block_tables.long()
    k, v = keys[tables].flatten(1, 2), values[tables].flatten(1, 2)  # [S, tokens, kv_heads, d]
    seen = torch.arange(k.shape[1], device=q.device) <= step.context_starts.unsqueeze(1)
    # Past its context a sequence's blocks may hold anything: NaN times a weight of 0 is NaN.
    unseen = ~seen[:, :, None, None]
    k, v = (x.masked_fill(unseen, 0).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )
    return out.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) in float32. x [T, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
