"""TritonOps: the `Ops` protocol on NVIDIA GPUs, by Triton kernels and verified cuBLASLt products.

This module chooses tiles and grids, and only in ways that do not change a row's bits. `kernels`
explains why the operations are batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moonpool_engine.engine.cuda import kernels
from moonpool_engine.engine.cuda.linears import Linears, precision
from moonpool_engine.engine.cuda.torch_ops import (
    DeviceStep,
    StepPlacer,
    TorchOps,
    device_name,
    gated,
)
from moonpool_engine.engine.ops import SILU, AttendArgs, Gate, HeadShape, Linear, QkNorm, RopeTable
from moonpool_engine.engine.quantized.matrix import Matrix, plain
from moonpool_engine.engine.slices import ROWS_INNER, key_rows, value_rows

ROW_TILE = 64  # rows of an attention tile: tokens times the query heads of one KV head
KEY_TILE = 64
SPLIT = 1024
"""Keys in one run of a program. A change of this length changes result bits, because each run has a
separate sum. Short runs keep the whole GPU busy with few sequences; long runs save work."""
PROGRAMS_PER_PROCESSOR = 2
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """The attention tiles of one step.

    sequences, firsts: [count] int32, each tile's sequence and its first row in that sequence.
    num_splits: the number of key runs of the longest context.
    """

    step: DeviceStep
    sequences: Tensor
    firsts: Tensor
    count: int
    num_splits: int


class TritonOps:
    """`Ops` for float32 and bfloat16 on a CUDA device."""

    name = "triton"
    inner = ROWS_INNER
    without = TorchOps.without
    delta_rule = TorchOps.delta_rule

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arithmetic = f"triton-1-{triton.__version__}-{device_name(device)}"
        self._placed = StepPlacer(device)
        self._tiles: Tiles | None = None
        self._linears = Linears()
        properties = torch.cuda.get_device_properties(device)
        self._processors = properties.multi_processor_count

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        placed_bias = None if bias is None else bias.to(self.device)
        return self._linears.choose(plain(weight).to(self.device).contiguous(), placed_bias)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, residual, weight, eps)

    def glu(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        if gate.kind != "silu":
            return gated(gate_up, gate)
        rows, both = gate_up.shape
        y = gate_up.new_empty(rows, both // 2)
        grid = (rows, triton.cdiv(both // 2, 1024))
        kernels.silu_mul_kernel[grid](gate_up.contiguous(), y, both // 2, BLOCK=1024)
        return y

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        heads, cache, layer, meta, *_ = args
        step = self._placed(meta)
        q = qkv.new_empty(meta.num_rows, heads.num_heads, heads.head_dim)
        keys = key_rows(cache, layer)
        kernels.rope_store_kernel[(meta.num_rows, heads.num_heads + 2 * heads.num_kv_heads)](
            qkv,
            q,
            keys,
            value_rows(cache, layer),
            rope.cos,
            rope.sin,
            q if qk_norm is None else qk_norm.q_weight,
            q if qk_norm is None else qk_norm.k_weight,
            step.positions,
            step.sequences,
            step.block_tables,
            step.block_tables.shape[1],
            keys.stride(0),
            0.0 if qk_norm is None else qk_norm.eps,
            HEADS=heads.num_heads,
            KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_TOKENS=cache.layout.block_tokens,
            QK_NORM=qk_norm is not None,
            HALF=triton.next_power_of_2(heads.head_dim // 2),
            num_warps=1,
        )
        return q

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        heads, cache, layer, meta, scale, _ = args
        tiles = self._tiles_of(self._placed(meta), heads)
        apart = tiles.num_splits > 1
        apart &= tiles.count * heads.num_kv_heads < PROGRAMS_PER_PROCESSOR * self._processors
        out = torch.empty_like(q)
        part_shape = (tiles.count, heads.num_kv_heads, tiles.num_splits, ROW_TILE)
        block_d = max(16, triton.next_power_of_2(heads.head_dim))
        best = total = part = out
        if apart:
            best, total = (out.new_empty(part_shape, dtype=torch.float32) for _ in range(2))
            part = out.new_empty((*part_shape, block_d), dtype=torch.float32)
        keys, step = key_rows(cache, layer), tiles.step
        where = (tiles.sequences, tiles.firsts, step.row_starts, step.context_starts)
        shape = {
            "HEADS": heads.num_heads,
            "KV_HEADS": heads.num_kv_heads,
            "HEAD_DIM": heads.head_dim,
            "SPLIT": SPLIT,
            "BLOCK_M": ROW_TILE,
            "BLOCK_D": block_d,
        }
        grid = (tiles.count, heads.num_kv_heads, tiles.num_splits if apart else 1)
        kernels.attend_kernel[grid](
            q,
            keys,
            value_rows(cache, layer),
            out,
            best,
            total,
            part,
            *where,
            step.block_tables,
            step.block_tables.shape[1],
            keys.stride(0),
            scale * LOG2_E,
            tiles.num_splits,
            APART=apart,
            BLOCK_TOKENS=cache.layout.block_tokens,
            PRECISION=precision(q),
            BLOCK_N=KEY_TILE,
            num_warps=4,
            num_stages=3 if q.dtype == torch.bfloat16 else 1,
            **shape,
        )
        if apart:
            runs = (out, best, total, part, *where, tiles.num_splits)
            kernels.merge_kernel[grid[:2]](*runs, num_warps=4, **shape)
        return out.flatten(1)

    def adopt(self, tiles: Tiles) -> None:
        """Uses a step whose device tensors the caller fills before each run of the kernels."""
        self._placed.adopt(tiles.step)
        self._tiles = tiles

    def _tiles_of(self, step: DeviceStep, heads: HeadShape) -> Tiles:
        """The step's tiles, computed once per step instead of once per layer."""
        tiles = self._tiles
        if tiles is not None and tiles.step is step:
            return tiles
        tokens = ROW_TILE // (heads.num_heads // heads.num_kv_heads)
        places = [(s, i) for s, count in enumerate(step.counts) for i in range(0, count, tokens)]
        longest = max(a + b for a, b in zip(step.counts, step.contexts, strict=True))
        placed = torch.tensor(places, dtype=torch.int32).t().contiguous().to(self.device)
        tiles = Tiles(step, placed[0], placed[1], len(places), triton.cdiv(longest, SPLIT))
        self._tiles = tiles
        return tiles


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    y = torch.empty_like(x)
    kernels.norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        y,
        width,
        eps,
        ADD=residual is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return y
