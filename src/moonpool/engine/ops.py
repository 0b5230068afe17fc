"""The few tensor operations a decoder model is made of, and who may implement them.

`engine.reference` implements them in plain torch: it is the meaning, slow and portable.
`engine.native` implements them with prepacked linears and our C++ kernels: it is checked against
the reference and chosen by itself where CPU and installation allow. Model code knows only this
protocol.

Two rules bind every implementation, because a cache hit must not change an answer:

* **Rows do not see each other.** The bits of a row's result depend on that row's input (and, in
  attention, on the KVCache before it), never on how many rows share the call, on their order, on
  how the prompt was chunked, nor on the thread count.
* **Nothing past a sequence's context is read into a result**: blocks may hold any bytes there,
  NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moonpool.config import Quantization
from moonpool.kvcache.layout import BlockLayout

SPAN = 256
"""Tokens that attention takes at once, from a multiple of it on."""
SEGMENT = 8 * SPAN
"""Tokens after which attention begins anew: segments may be attended apart, anywhere, and merged
in their order, with the same bits as in one go. attention.cpp has the same numbers."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Where the rows of one step sit. T rows (tokens) of S sequences; all index tensors are int32.

    Rows of one sequence are adjacent and ascend in position. Sequence s owns rows
    `row_starts[s] : row_starts[s + 1]`; its first row stands at `context_starts[s]` (tokens
    before it are already in the KVCache); row positions are `positions[T]`. `block_tables[s, i]`
    is the physical block of its tokens `i * block_tokens ...`; padded with 0.
    """

    positions: Tensor  # [T] int32
    row_starts: Tensor  # [S + 1] int32
    context_starts: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    num_rows: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class KvCache:
    """The block arena as the engine sees it: `blocks[b, layer - first_layer]` is one contiguous
    slice. Only a stage's cache on a GPU has not all layers.

    blocks: [num_blocks, num_layers, slice_elements], of the layout's dtype.
    """

    blocks: Tensor
    layout: BlockLayout
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles, already scaled. cos, sin: [max_positions, rotary_dim / 2] float32.

    The rotation pairs element i with i + rotary_dim / 2 ("rotate half", as Llama checkpoints have
    it).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Per-head RMSNorm of q and k before rope (Qwen3). Weights: [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Linear(Protocol):
    """`y = x @ weight.T + bias`. x: [T, in_features] -> [T, out_features], dtype of the model."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Ops(Protocol):
    """Stateless but for the weights packed by `linear`. Engines whose `arithmetic` is equal compute
    equal bits; others must not share blocks."""

    name: str
    arithmetic: str
    inner: str  # of the slices they read and write
    device: torch.device  # of the blocks, the weights and every [T, ...]; `StepMeta` is on the CPU

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Packs `weight` [out, in]. The caller drops its own copy afterwards."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, hidden] -> [T, hidden]; mean square in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then returns the norm of residual. All [T, hidden]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * f] -> [T, f]: silu(first half) * second half."""
        ...

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
        """Norms (if asked) and rotates q and k, writes k and v into their blocks, returns q.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim] -> q [T, num_heads, head_dim].
        """
        ...

    def attend(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        """Causal attention of each row over its sequence's KVCache, the row's own token included.

        q [T, num_heads, head_dim] -> [T, num_heads * head_dim]. Scores and sums in float32.
        """
        ...


def with_quantization(arithmetic: str, quantization: Quantization) -> str:
    """Its name with rounded weights: other numbers come of it, so other blocks."""
    return arithmetic if quantization == "none" else f"{arithmetic} {quantization}"


class SplitOps(Ops, Protocol):
    """Operations whose attention call can be taken apart, so that another process, which holds the
    blocks, does its share: `rope` here; `store`, and one of the others, there. Every way gives the
    bits of `rope_store` and `attend`."""

    def rope(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
    ) -> tuple[Tensor, Tensor]:
        """`rope_store` without blocks: q [T, num_heads, head_dim], and K beside V
        [T, 2 * num_kv_heads, head_dim]."""
        ...

    def store(
        self, kv: Tensor, heads: HeadShape, cache: KvCache, layer: int, meta: StepMeta
    ) -> None:
        """Writes what `rope` gave into the rows' blocks."""
        ...

    def attend_old(
        self, q: Tensor, heads: HeadShape, cache: KvCache, layer: int, meta: StepMeta, scale: float
    ) -> Tensor:
        """Attention as far as it goes without the step's own K and V: a state for `attend_new`."""
        ...

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
        """Goes on from `attend_old`, with K and V stored: the result of `attend`."""
        ...

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
        """Partials [T, num_heads, head_dim + 2] float32 of one segment of each sequence's context:
        highest score (base 2, -inf if there is none), sum of weights, and output times that sum.
        segments: [S] int32. Only their blocks need be in the tables."""
        ...

    def merge(self, partials: Tensor, order: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        """[P, num_heads, head_dim + 2] -> [rows, num_heads * head_dim]: row r is the merged
        `partials[order[starts[r] : starts[r + 1]]]`, in the order of their tokens; 0 if none has
        seen a token. order, starts: int32."""
        ...


def empty_cache(
    layout: BlockLayout,
    num_blocks: int,
    device: torch.device | None = None,
    layers: range | None = None,
) -> KvCache:
    """Zeroed blocks of the engine's own, not shared with the messenger; on the CPU, and with all
    layers, by default."""
    layers = range(layout.num_layers) if layers is None else layers
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    shape = (num_blocks, len(layers), layout.slice_elements)
    return KvCache(torch.zeros(shape, dtype=dtype, device=device), layout, layers.start)
