"""NativeOps: the `Ops` protocol on the C++ kernels.

The checks here keep a wrong tensor from becoming a wrong address. The .cpp files explain the
arithmetic and its batch invariance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool_engine.engine.native.build import library_name
from moonpool_engine.engine.native.library import (
    ATTEND_CALL,
    DELTA_CALL,
    ROPE_CALL,
    Kernels,
    open_kernels,
)
from moonpool_engine.engine.native.linear import NativeInt8Linear, NativeLinear, PackedMemory
from moonpool_engine.engine.native.quantized import NativeQuantizedLinear
from moonpool_engine.engine.ops import (
    SILU,
    AttendArgs,
    DeltaArgs,
    DeltaWeights,
    Gate,
    HeadShape,
    KvCache,
    Linear,
    QkNorm,
    RopeTable,
    StateError,
    StepMeta,
    block_dtype,
    with_quantization,
)
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix
from moonpool_engine.engine.quantized.rounding import rounded_to_int4
from moonpool_engine.engine.slices import INNER, check_layout

_OTHER_STATE = 2  # what the kernel returns if a block holds another state
GATES = ("silu", "gelu_tanh", "clamped")
"""The kinds of `Gate`, by the numbers that rowwise.cpp gives them."""


class NativeOps:
    """Linears, attention and row-wise operations in C++, float32 and bfloat16.

    `isa` selects an instruction set below the CPU's best ("avx2", "avx512", "avx512bf16").
    `quantization` applies to the weights of all linears. Kernels use `torch.get_num_threads()`
    threads. Raises NativeUnavailableError if the kernels cannot run.
    """

    name = "native"
    inner = INNER
    without: frozenset[str] = frozenset()
    device = torch.device("cpu")

    def __init__(self, isa: str | None = None, quantization: Quantization = "none") -> None:
        self.isa, self._kernels = open_kernels(isa)
        self.arithmetic = with_quantization(f"{library_name()} {self.isa}", quantization)
        self._quantization = quantization
        self._memory = PackedMemory()
        self._step: tuple[StepMeta, tuple[int, ...]] | None = None
        self._arena: tuple[KvCache, HeadShape, torch.dtype, _Arena] | None = None

    def _of(self, x: Tensor) -> Kernels:
        try:
            return self._kernels[x.dtype]
        except KeyError:
            raise ValueError(f"native ops take float32 or bfloat16, not {x.dtype}") from None

    def _step_addresses(self, meta: StepMeta) -> tuple[int, ...]:
        """The addresses of `meta`'s tensors, checked once per step instead of once per layer.

        Keeping a reference to `meta` keeps the addresses valid.
        """
        step = self._step
        if step is None or step[0] is not meta:
            step = self._step = (meta, _addresses(meta))
        return step[1]

    def _arena_of(self, cache: KvCache, heads: HeadShape, dtype: torch.dtype) -> _Arena:
        seen = self._arena
        if seen is None or seen[0] is not cache or seen[1] is not heads or seen[2] is not dtype:
            seen = self._arena = (cache, heads, dtype, _Arena(cache, heads, dtype))
        return seen[3]

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        if self._quantization == "int4" and isinstance(weight, Tensor):
            weight = rounded_to_int4(weight)
        if isinstance(weight, QuantizedMatrix):
            kernels = self._kernels[weight.dtype]
            return NativeQuantizedLinear(kernels, weight, bias, self._memory)
        if self._quantization == "int8":
            return NativeInt8Linear(self._of(weight).linear_int8, weight, bias, self._memory)
        return NativeLinear(self._of(weight).linear, weight, bias, self._memory)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return NativeLinear(self._of(weight).linear, weight, bias, self._memory)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        x = x.contiguous()
        same_width(weight, width)
        y = torch.empty_like(x)
        self._of(x).rms_norm(
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps, torch.get_num_threads()
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Like `Ops.add_rms_norm`. Raises ValueError if shapes or dtypes differ, or if `residual`
        is not contiguous."""
        rows, width = x.shape
        x = x.contiguous()
        same_width(weight, width)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise ValueError(f"residual is {list(residual.shape)}, x is {list(x.shape)}")
        if not residual.is_contiguous():
            raise ValueError("residual is updated in place: it must be contiguous")
        y = torch.empty_like(x)
        self._of(x).add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return y

    def glu(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        rows, both = gate_up.shape
        gate_up = gate_up.contiguous()
        y = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        self._of(gate_up).glu(
            gate_up.data_ptr(),
            y.data_ptr(),
            rows,
            both // 2,
            GATES.index(gate.kind),
            gate.alpha,
            gate.limit,
            torch.get_num_threads(),
        )
        return y

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Like `Ops.soft_cap`. Raises ValueError for another dtype than float32, and a cap not
        above 0."""
        x = x.contiguous()
        if x.dtype is not torch.float32 or not cap > 0:
            raise ValueError(f"soft_cap takes float32 and a cap above 0, got {x.dtype} and {cap}")
        y = torch.empty_like(x)
        self._of(x).soft_cap(x.data_ptr(), y.data_ptr(), x.numel(), cap, torch.get_num_threads())
        return y

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        """Like `Ops.rope_store`. Raises ValueError for tensors that fit neither heads nor step, and
        IndexError for a position outside its block table or the angles of `rope`."""
        heads, cache, layer, meta, *_ = args
        qkv = qkv.contiguous()
        arena = self._arena_of(cache, heads, qkv.dtype)
        q = torch.empty(meta.num_rows, heads.num_heads, heads.head_dim, dtype=qkv.dtype)
        blocks = (arena.block_bytes, arena.num_blocks, meta.block_tables.shape[1])
        where = (arena.slice_address(layer), blocks, arena.block_tokens, arena.fp8)
        call = self._rope_call(qkv, q, heads, rope, qk_norm, meta, where)
        if self._of(qkv).rope_store(call, torch.get_num_threads()):
            raise IndexError("rope_store: a row's position lies outside its block table or rope")
        return q

    def _rope_call(
        self,
        qkv: Tensor,
        q: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
        where: tuple[int, tuple[int, int, int], int, bool],
    ) -> bytes:
        """Packs the arguments of `rope_store` and `rope`.

        `where` is the target of K and V: its address, (bytes per block, number of blocks, width of
        the block tables), the tokens per block, and whether blocks hold 8 bits.
        """
        d = heads.head_dim
        _same_rows(qkv, heads.row_heads * d, meta)
        max_positions, half = rope.cos.shape
        if qk_norm is not None:
            same_width(qk_norm.q_weight, d)
            same_width(qk_norm.k_weight, d)
        address, blocks, block_tokens, fp8 = where
        return ROPE_CALL.pack(
            qkv.data_ptr(),
            q.data_ptr(),
            address,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            0 if qk_norm is None else qk_norm.q_weight.data_ptr(),
            0 if qk_norm is None else qk_norm.k_weight.data_ptr(),
            *self._step_addresses(meta),
            *blocks,
            meta.num_sequences,
            heads.num_heads,
            heads.num_kv_heads,
            d,
            half,
            max_positions,
            block_tokens,
            heads.latent_dim,
            fp8,
            0.0 if qk_norm is None else qk_norm.eps,
        )

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Like `Ops.attend`. Raises ValueError for tensors that fit neither heads nor step, and
        IndexError for a context outside its block table."""
        heads, meta = args.heads, args.meta
        out = torch.empty(meta.num_rows, heads.num_heads * heads.value_dim, dtype=q.dtype)
        q = queries_of(q, heads, meta)
        call = self._attend_call(q, out.data_ptr(), args)
        if self._of(q).attend(call, torch.get_num_threads()):
            raise IndexError("attend: a row's context lies outside its block table")
        return out

    def _attend_call(self, q: Tensor, out: int, args: AttendArgs) -> bytes:
        """Packs the arguments of `attend`. `out` is the address of the output.

        `q`, as returned by `queries_of`, must live until the kernel has run.
        """
        heads, cache, layer, meta, scale, rule = args
        if rule.sinks is not None:
            same_width(rule.sinks, heads.num_heads)
        arena = self._arena_of(cache, heads, q.dtype)
        return ATTEND_CALL.pack(
            q.data_ptr(),
            out,
            arena.slice_address(layer),
            *self._step_addresses(meta),
            0 if rule.sinks is None else rule.sinks.data_ptr(),
            arena.block_bytes,
            arena.num_blocks,
            meta.block_tables.shape[1],
            meta.num_sequences,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            arena.block_tokens,
            rule.window,
            heads.latent_dim,
            arena.fp8,
            scale,
            rule.soft_cap,
        )

    def delta_rule(self, x: Tensor, weights: DeltaWeights, args: DeltaArgs) -> Tensor:
        """Like `Ops.delta_rule`. Raises ValueError for tensors that fit neither heads nor step, and
        IndexError for a position outside its block table."""
        spec, cache, layer, meta = args
        layout, blocks = cache.layout, cache.blocks
        x = x.contiguous()
        _same_rows(x, spec.width, meta)
        same_width(weights.taps, spec.taps)
        same_width(weights.decay, spec.value_heads)
        same_width(weights.step_bias, spec.value_heads)
        same_width(weights.norm, spec.value_dim)
        size = blocks.element_size()
        fits = blocks.stride(2) == 1 and spec.state_bytes <= layout.slice_bytes
        if not fits or weights.taps.shape[1] != spec.channels:
            raise ValueError(f"the KVCache ({layout}) does not fit {spec}")
        if not 0 <= layer < blocks.shape[1]:
            raise IndexError(f"layer {layer} of {blocks.shape[1]}")
        out = torch.empty(meta.num_rows, spec.values, dtype=x.dtype)
        unchecked: Tensor | None = None
        if meta.unchecked:
            unchecked = torch.zeros(meta.num_sequences, dtype=torch.uint8)
            unchecked[list(meta.unchecked)] = 1
        call = DELTA_CALL.pack(
            x.data_ptr(),
            out.data_ptr(),
            blocks.data_ptr() + layer * blocks.stride(1) * size,
            *self._step_addresses(meta),
            *(weight.data_ptr() for weight in weights[:4]),
            0 if unchecked is None else unchecked.data_ptr(),
            blocks.stride(0) * size,
            blocks.shape[0],
            meta.block_tables.shape[1],
            meta.num_sequences,
            spec.key_heads,
            spec.value_heads,
            spec.key_dim,
            spec.value_dim,
            spec.taps,
            layout.block_tokens,
            spec.tiled,
            weights.eps,
        )
        failed = self._of(x).delta_rule(call, torch.get_num_threads())
        if failed == _OTHER_STATE:
            raise StateError("a block has not the state of linear attention that a step continues")
        if failed:
            raise IndexError("delta_rule: a row's position lies outside its block table")
        return out


def same_width(weight: Tensor, width: int) -> None:
    """Raises ValueError for another width or dtype, or gaps."""
    wide = weight.dtype is torch.float32
    if not wide or weight.shape[0] != width or not weight.is_contiguous():
        raise ValueError(
            f"norm weights and sinks must be contiguous [{width}] float32, "
            f"got {list(weight.shape)} {weight.dtype}"
        )


def queries_of(q: Tensor, heads: HeadShape, meta: StepMeta) -> Tensor:
    """[T, num_heads, head_dim] or [T, num_heads * head_dim] -> the second shape, contiguous."""
    width = heads.num_heads * heads.head_dim
    q = q.reshape(-1, width).contiguous()
    _same_rows(q, width, meta)
    return q


def _same_rows(x: Tensor, width: int, meta: StepMeta) -> None:
    if x.shape[0] != meta.num_rows or x.shape[1] != width:
        raise ValueError(f"expected [{meta.num_rows}, {width}], got {list(x.shape)}")


class _Arena:
    """The addresses of a KVCache's slices, checked against the heads and the rows' dtype."""

    __slots__ = (
        "_base",
        "_num_layers",
        "_slice_stride",
        "block_bytes",
        "block_tokens",
        "fp8",
        "num_blocks",
    )

    def __init__(self, cache: KvCache, heads: HeadShape, dtype: torch.dtype) -> None:
        layout, blocks = cache.layout, cache.blocks
        check_layout(layout)
        shape = (blocks.shape[0], layout.num_layers, layout.slice_elements)
        same = layout.num_kv_heads == heads.num_kv_heads and layout.head_dim == heads.head_dim
        same = same and layout.is_latent == (heads.latent_dim > 0)
        same = same and layout.dtype == str(dtype).removeprefix("torch.")
        same = same and blocks.dtype is block_dtype(layout) and blocks.stride(2) == 1
        if not same or blocks.shape != shape:
            raise ValueError(f"the KVCache ({layout}) does not fit {heads} in {dtype}")
        if heads.num_heads % heads.num_kv_heads:
            raise ValueError(f"{heads}: num_heads must be a multiple of num_kv_heads")
        if not 0 <= heads.latent_dim <= heads.head_dim or heads.latent_dim % 16:
            raise ValueError(f"{heads}: latent_dim must be a multiple of 16 within head_dim")
        size = blocks.element_size()
        self.fp8 = layout.is_fp8
        self._base = blocks.data_ptr()
        self._num_layers = layout.num_layers
        self._slice_stride = blocks.stride(1) * size
        self.block_bytes = blocks.stride(0) * size
        self.num_blocks = blocks.shape[0]
        self.block_tokens = layout.block_tokens

    def slice_address(self, layer: int) -> int:
        """The address of the layer's slice in block 0. Raises IndexError."""
        if not 0 <= layer < self._num_layers:
            raise IndexError(f"layer {layer} of {self._num_layers}")
        return self._base + layer * self._slice_stride


def _addresses(meta: StepMeta) -> tuple[int, ...]:
    tensors = (meta.positions, meta.row_starts, meta.block_tables)
    if any(x.dtype is not torch.int32 or not x.is_contiguous() for x in tensors):
        raise ValueError("StepMeta tensors must be contiguous int32")
    sizes = tuple(x.shape[0] for x in tensors)
    if sizes != (meta.num_rows, meta.num_sequences + 1, meta.num_sequences):
        raise ValueError(f"StepMeta sizes {sizes} do not match its counts")
    starts = meta.row_starts.tolist()
    if starts[0] != 0 or starts[-1] != meta.num_rows or starts != sorted(starts):
        raise ValueError("StepMeta.row_starts must rise from 0 to num_rows")
    return tuple(x.data_ptr() for x in tensors)
