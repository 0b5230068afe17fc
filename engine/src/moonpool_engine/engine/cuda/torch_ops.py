"""The operations of a decoder on any device, by torch's own kernels.

These operations are the reference for the Triton kernels (`triton_ops`) and replace them where
Triton is missing. torch chooses kernels by the shape of the call, so these operations are *not*
batch-invariant: tokens may differ where two candidates tie within rounding.

`StepPlacer` copies a step's index tensors to the device once per step instead of once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.ops import (
    SILU,
    AttendArgs,
    DeltaArgs,
    DeltaWeights,
    Gate,
    Linear,
    QkNorm,
    RopeTable,
    StepMeta,
)
from moonpool_engine.engine.quantized.matrix import Matrix, plain
from moonpool_engine.engine.slices import ROWS_INNER, key_rows, value_rows


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """`StepMeta` on the device. The lists are for the host."""

    meta: StepMeta
    positions: Tensor  # [T] int32
    sequences: Tensor  # [T] int32: the sequence of each row
    row_starts: Tensor  # shape [S + 1], int32
    context_starts: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    counts: list[int]  # number of rows of each sequence
    contexts: list[int]  # number of cached tokens of each sequence


def place_step(meta: StepMeta, device: torch.device) -> DeviceStep:
    """Copies a step's index tensors to the device in one transfer."""
    counts = meta.row_starts.diff()
    sequences = torch.arange(meta.num_sequences, dtype=torch.int32).repeat_interleave(counts)
    parts = (meta.positions, sequences, meta.row_starts, meta.context_starts, meta.block_tables)
    packed = torch.cat([part.flatten() for part in parts]).to(device)
    there = packed.split([part.numel() for part in parts])
    return DeviceStep(
        meta=meta,
        positions=there[0],
        sequences=there[1],
        row_starts=there[2],
        context_starts=there[3],
        block_tables=there[4].view(meta.block_tables.shape),
        counts=counts.tolist(),
        contexts=meta.context_starts.tolist(),
    )


class StepPlacer:
    """Keeps the last step on the device, since all its layers need the same tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: DeviceStep | None = None

    def adopt(self, step: DeviceStep) -> None:
        """Uses a step whose device tensors the caller has made (CUDA graphs)."""
        self._last = step

    def __call__(self, meta: StepMeta) -> DeviceStep:
        last = self._last
        if last is None or last.meta is not meta:
            last = self._last = place_step(meta, self._device)
        return last


class TorchOps:
    """`Ops` by torch's kernels, for float32 and bfloat16, on `device`."""

    name = "torch"
    inner = ROWS_INNER
    without = frozenset(
        {
            "sliding windows",
            "caps on scores",
            "partial RoPE",
            "attention sinks",
            "a mixture of experts",
            "latent attention",
            "linear attention",
        }
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arithmetic = f"torch-{torch.__version__}-{device_name(device)}"
        self._placed = StepPlacer(device)

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        placed = plain(weight).to(self.device)
        placed_bias = None if bias is None else bias.to(self.device)
        return lambda x: F.linear(x, placed, placed_bias)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide * scale)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def glu(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        return gated(gate_up, gate)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        heads, cache, layer, meta, *_ = args
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

    @staticmethod
    def delta_rule(x: Tensor, weights: DeltaWeights, args: DeltaArgs) -> Tensor:
        """Always raises ModelError: GPUs compute no linear attention yet."""
        raise ModelError("a model with linear attention needs --device cpu")

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        _, cache, layer, meta, scale, _ = args
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


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """Computes `Ops.glu` one element at a time, so that no element depends on another's place."""
    x, up = gate_up.float().chunk(2, dim=-1)
    active = F.silu(x) if gate.kind == "silu" else F.gelu(x, approximate="tanh")
    return (active * up).to(gate_up.dtype)


def device_name(device: torch.device) -> str:
    """The GPU's model name, as part of the arithmetic's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _attend(q: Tensor, k: Tensor, v: Tensor, context: int, scale: float) -> Tensor:
    """Causal attention of q [T, heads, d], after `context` tokens, over k and v.

    k, v: [context + T, kv_heads, d]. Returns [T, heads, d].
    """
    rows = torch.arange(context, len(k), device=q.device).unsqueeze(1)
    seen = torch.arange(len(k), device=q.device) <= rows
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode(q: Tensor, keys: Tensor, values: Tensor, step: DeviceStep, scale: float) -> Tensor:
    """Attention of one row per sequence: q [S, heads, d] -> [S, heads * d].

    keys, values: [num_blocks, block_tokens, kv_heads, d], gathered to the longest context.
    """
    tables = step.block_tables.long()
    k, v = keys[tables].flatten(1, 2), values[tables].flatten(1, 2)  # [S, tokens, kv_heads, d]
    seen = torch.arange(k.shape[1], device=q.device) <= step.context_starts.unsqueeze(1)
    # Blocks may hold NaN past a sequence's context, and 0 times NaN is NaN.
    unseen = ~seen[:, :, None, None]
    k, v = (x.masked_fill(unseen, 0).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )
    return out.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) in float32.

    x: [T, heads, head_dim]; cos, sin: [T, 1, head_dim / 2].
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
