"""The tensor operations of a decoder model, as a protocol for several implementations.

`engine.reference` implements these operations in plain torch; it is slow and portable, and defines
the results. `engine.native` implements the operations in C++ and is tested against the reference.
`engine.cuda` implements the operations on GPUs. Model code uses only this protocol.

Two rules bind every implementation, because a cache hit must not change an answer:

* **Rows are independent (batch invariance).** The bits of a row's result depend on that row's
  input, and in attention on the KVCache before it. Results do not depend on the number or order of
  rows in the call, on the chunks of the prompt, or on the thread count. Library kernels break this
  rule: `F.linear` differs at 1 to 3 rows in float32 (docs/decisions/batch-invariance.md).
* **No result reads past a sequence's context.** Blocks may hold any bytes there, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine.quantized.matrix import Matrix
from moonpool_engine.engine.spec import DeltaSpec

SPAN = 256
"""Number of tokens that attention processes together, starting at a multiple of SPAN."""
SEGMENT = 8 * SPAN
"""Tokens after which attention restarts its sums. Segments may be computed separately, in any
process, and merged in their order, with the bits of a single pass. attention.cpp has the same
numbers."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Where the rows of one step lie in sequences and blocks. T rows (tokens) of S sequences; all
    index tensors are int32.

    Rows of one sequence are adjacent and ascend in position. Sequence s owns rows
    `row_starts[s] : row_starts[s + 1]`; its first row stands at `context_starts[s]` (tokens
    before it are already in the KVCache); row positions are `positions[T]`. `block_tables[s, i]` is
    the physical block of tokens `i * block_tokens ...` of sequence s; padded with 0.
    """

    positions: Tensor  # [T] int32
    row_starts: Tensor  # shape [S + 1], int32
    context_starts: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    num_rows: int
    num_sequences: int
    adapters: tuple[int, ...] = ()
    """The LoRA adapter of each sequence, numbered from 1; 0 means none. () means that no sequence
    has one."""
    unchecked: tuple[int, ...] = ()
    """The sequences whose blocks may hold anything: in a measurement, or where some never came."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The block arena: `blocks[b, layer - first_layer]` is one contiguous slice. The tensor has all
    layers, except on a GPU in a pipeline stage.

    blocks: [num_blocks, num_layers, slice_elements], of `block_dtype`.
    """

    blocks: Tensor
    layout: BlockLayout
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles, already scaled. cos, sin: [max_positions, rotary_dim / 2] float32.

    The rotation pairs element i with i + rotary_dim / 2 ("rotate half", as in Llama checkpoints).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Grouped-query attention: `num_heads` is a multiple of `num_kv_heads`.

    With `latent_dim`, that many elements at the end of a key are also its value (MLA), and no V is
    stored.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0

    @property
    def value_dim(self) -> int:
        """Elements of a value, and of a head's output."""
        return self.latent_dim or self.head_dim

    @property
    def stored_heads(self) -> int:
        """Returns the number of heads of K and V together, as a block stores them for a token."""
        return (1 if self.latent_dim else 2) * self.num_kv_heads

    @property
    def row_heads(self) -> int:
        """Heads of q, k and v together, in a row of `qkv`."""
        return self.num_heads + self.stored_heads


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Per-head RMSNorm of q and k before rope (Qwen3). Weights: [head_dim] float32."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class AttendRule(NamedTuple):
    """How a layer's attention differs from causal softmax over the whole context."""

    window: int = 0  # number of tokens that a row sees, including its own; 0 means all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0 means no cap
    sinks: Tensor | None = None  # [num_heads] float32: a score that takes weight but has no value


PLAIN = AttendRule()


class StateError(ValueError):
    """A block does not hold the state of linear attention that a step continues from."""


class DeltaWeights(NamedTuple):
    """The weights of the gated delta rule (`engine.delta`), all float32."""

    taps: Tensor  # [taps, channels] of the convolution, the newest token's last
    decay: Tensor  # [value_heads], above 0
    step_bias: Tensor  # [value_heads]
    norm: Tensor  # shape [value_dim]: weights of the norm of each value head
    eps: float


class DeltaArgs(NamedTuple):
    """The sequences whose states a step continues, and where these states lie."""

    spec: DeltaSpec
    cache: KvCache
    layer: int
    meta: StepMeta


class AttendArgs(NamedTuple):
    """The arguments that all attention operations on one layer share. `scale` is the factor of the
    scores."""

    heads: HeadShape
    cache: KvCache
    layer: int
    meta: StepMeta
    scale: float
    rule: AttendRule = PLAIN


class Gate(NamedTuple):
    """The activation of a gated MLP. `kind` is "silu", "gelu_tanh" (GELU by tanh) or "clamped".

    "clamped" (gpt-oss): gate <= limit, -limit <= up <= limit; gate * sigmoid(alpha * gate) *
    (up + 1).
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0


SILU = Gate()


class Linear(Protocol):
    """`y = x @ weight.T + bias`. x: [T, in_features] -> [T, out_features], dtype of the model."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Ops(Protocol):
    """The operations of one device. Implementations have no state except the weights packed by
    `linear`.

    Engines with equal `arithmetic` compute equal bits; others must not share blocks.
    """

    name: str
    arithmetic: str
    inner: str  # the order of elements within slices (`engine.slices`)
    # the entries of `ModelSpec.extras` that this implementation does not compute
    without: frozenset[str]
    # device of blocks, weights and every [T, ...] tensor; `StepMeta` is on the CPU
    device: torch.device

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """Packs `weight` [out, in] and `bias` [out]. The caller drops its copy afterwards."""
        ...

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Makes a `linear` that is never quantized, for discrete decisions (routers)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, hidden] -> [T, hidden]; mean square in float32. weight: [hidden] float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to residual in place and returns the norm of residual. All tensors are [T,
        hidden]."""
        ...

    def glu(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        """[T, 2 * f] -> [T, f]: activation(first half) * second half."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of x [T, n] float32."""
        ...

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        """Norms q and k (with `qk_norm`), rotates both, and writes k and v into their blocks.

        qkv: [T, row_heads * head_dim] -> q [T, num_heads, head_dim]. Only the pairs of `rope` are
        rotated, starting at element 0.
        """
        ...

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Causal attention of each row over its sequence's KVCache, the row's own token included.

        q [T, num_heads, head_dim] -> [T, num_heads * value_dim]. Scores and sums in float32.
        """
        ...

    def delta_rule(self, x: Tensor, weights: DeltaWeights, args: DeltaArgs) -> Tensor:
        """Continues each sequence's state over its rows. Writes the state into each block that the
        rows fill, and into the block of the last row. x [T, spec.width] -> [T, spec.values].

        Per row, with silu after the convolution, unit q and k, and q times key_dim ** -0.5:
        state *= exp(-decay * softplus(a + step_bias)); state += k (v - k state)^T * sigmoid(b);
        out = norm(q state) * silu(z). Computes in float32, row after row, so that chunks change no
        bit. Raises StateError.
        """
        ...


def with_quantization(arithmetic: str, quantization: Quantization) -> str:
    """The name of the arithmetic with quantized weights, which give other blocks."""
    return arithmetic if quantization == "none" else f"{arithmetic} {quantization}"


class SplitOps(Ops, Protocol):
    """Operations whose attention can be divided between two processes (attention offloading).

    This process calls `rope`. The process with the blocks calls `store`, then either `attend`, or
    `attend_old` and `attend_new`, or `attend_segments`. All combinations give the bits of
    `rope_store` and `attend`.
    """

    def rope(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
    ) -> tuple[Tensor, Tensor]:
        """Does what `rope_store` does, without blocks. Returns q [T, num_heads, head_dim], and K
        followed by V [T, 2 * num_kv_heads, head_dim]; of latents K alone, [T, num_kv_heads,
        head_dim]."""
        ...

    def store(self, kv: Tensor, args: AttendArgs) -> None:
        """Writes K and V, as `rope` returned them, into the rows' blocks."""
        ...

    def attend_old(self, q: Tensor, args: AttendArgs) -> Tensor:
        """The attention over tokens before the step's own K and V: a state for `attend_new`."""
        ...

    def attend_new(self, q: Tensor, state: Tensor, args: AttendArgs) -> Tensor:
        """Continues `attend_old` once K and V are stored: the result of `attend`."""
        ...

    def attend_segments(self, q: Tensor, segments: Tensor, args: AttendArgs) -> Tensor:
        """Partial attention over one segment of each sequence's context.

        segments [S] int32 -> [T, num_heads, value_dim + 2] float32: the highest score (base 2, -inf
        without tokens), the sum of weights, and the output times that sum. The block tables need
        only contain the blocks of the given segments.
        """
        ...

    def merge(
        self,
        partials: Tensor,
        order: Tensor,
        starts: Tensor,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Merges partials [P, num_heads, value_dim + 2] -> [rows, num_heads * value_dim].

        Row r merges `partials[order[starts[r] : starts[r + 1]]]`, in the order of their tokens. The
        result is 0 if no partial has a token. order, starts: int32. sinks: as `AttendRule.sinks`,
        which no partial includes yet.
        """
        ...


def empty_cache(
    layout: BlockLayout,
    num_blocks: int,
    device: torch.device | None = None,
    layers: range | None = None,
) -> KvCache:
    """Zeroed blocks in the engine's own memory, by default on the CPU and with all layers."""
    layers = range(layout.num_layers) if layers is None else layers
    shape = (num_blocks, len(layers), layout.slice_elements)
    blocks = torch.zeros(shape, dtype=block_dtype(layout), device=device)
    return KvCache(blocks, layout, layers.start)


def block_dtype(layout: BlockLayout) -> torch.dtype:
    """The dtype of `KvCache.blocks`: the layout's, or bytes if they hold fp8."""
    return torch.uint8 if layout.is_fp8 else compute_dtype(layout)


def compute_dtype(layout: BlockLayout) -> torch.dtype:
    """The dtype of activations, whatever K and V are stored in."""
    return torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
