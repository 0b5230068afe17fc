"""NativeOps: the `Ops` protocol on our C++ kernels.

Owns packing of weights and the checks that keep a wrong tensor from becoming a wrong address.
The arithmetic, and why a row's bits do not depend on its neighbours, is in the .cpp files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.config import Quantization
from moonpool.engine.native.int8 import PANEL, NativeInt8Linear
from moonpool.engine.native.library import ATTEND_CALL, ROPE_CALL, Call, Kernels, open_kernels
from moonpool.engine.native.memory import PackedMemory
from moonpool.engine.native.sources import library_name
from moonpool.engine.ops import (
    HeadShape,
    KvCache,
    Linear,
    QkNorm,
    RopeTable,
    StepMeta,
    with_quantization,
)
from moonpool.engine.slices import INNER, LANE_BYTES, check_layout


class NativeLinear:
    """A weight packed as [out / 32][lanes of in][32], and its bias in float32, padded likewise."""

    __slots__ = (
        "_bias",
        "_bias_address",
        "_call",
        "_weight",
        "_weight_address",
        "dtype",
        "in_features",
        "out_features",
    )

    def __init__(self, call: Call, weight: Tensor, bias: Tensor | None, memory: PackedMemory):
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._call = call
        self._weight = _pack_weight(weight, memory)
        self._weight_address = self._weight.data_ptr()
        self._bias: Tensor | None = None
        self._bias_address = 0
        if bias is not None:
            self._bias = torch.zeros(self._weight.shape[0] * PANEL, dtype=torch.float32)
            self._bias[: self.out_features] = bias
            self._bias_address = self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if width != self.in_features or x.dtype is not self.dtype:
            raise ValueError(
                f"linear takes [T, {self.in_features}] {self.dtype}, got {list(x.shape)} {x.dtype}"
            )
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty(rows, self.out_features, dtype=self.dtype)
        self._call(
            x.data_ptr(),
            self._weight_address,
            self._bias_address,
            y.data_ptr(),
            rows,
            width,
            self.out_features,
            torch.get_num_threads(),
        )
        return y


def _pack_weight(weight: Tensor, memory: PackedMemory) -> Tensor:
    out, width = weight.shape
    pack = LANE_BYTES // weight.element_size()
    panels, lanes = -(-out // PANEL), -(-width // pack)
    if out != panels * PANEL or width != lanes * pack:
        padded = weight.new_zeros(panels * PANEL, lanes * pack)
        padded[:out, :width] = weight
        weight = padded
    flat = weight.contiguous().view(torch.int32).view(panels, PANEL, lanes)
    packed = memory.take(flat.numel() * LANE_BYTES).view(torch.int32).view(panels, lanes, PANEL)
    return packed.copy_(flat.transpose(1, 2))


class NativeOps:
    """Linears, attention and row-wise operations in C++, float32 and bfloat16.

    `isa` forces a plainer instruction set than the CPU's best ("avx2", "avx512", "avx512bf16").
    `quantization` is of the weights of all linears. Uses `torch.get_num_threads()` threads. Raises
    NativeUnavailableError where it cannot run.
    """

    name = "native"
    inner = INNER
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
        """Checked once per step, not once per layer. Holding `meta` keeps the addresses true."""
        step = self._step
        if step is None or step[0] is not meta:
            step = self._step = (meta, _addresses(meta))
        return step[1]

    def _arena_of(self, cache: KvCache, heads: HeadShape, dtype: torch.dtype) -> _Arena:
        seen = self._arena
        if seen is None or seen[0] is not cache or seen[1] is not heads or seen[2] is not dtype:
            seen = self._arena = (cache, heads, dtype, _Arena(cache, heads, dtype))
        return seen[3]

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._quantization == "int8":
            return NativeInt8Linear(self._of(weight).linear_int8, weight, bias, self._memory)
        return NativeLinear(self._of(weight).linear, weight, bias, self._memory)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        x = x.contiguous()
        _same(x, weight, width)
        y = torch.empty_like(x)
        self._of(x).rms_norm(
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps, torch.get_num_threads()
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        x = x.contiguous()
        _same(x, weight, width)
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

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        gate_up = gate_up.contiguous()
        y = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        self._of(gate_up).silu_mul(
            gate_up.data_ptr(), y.data_ptr(), rows, both // 2, torch.get_num_threads()
        )
        return y

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
        qkv = qkv.contiguous()
        arena = self._arena_of(cache, heads, qkv.dtype)
        q = torch.empty(meta.num_rows, heads.num_heads, heads.head_dim, dtype=qkv.dtype)
        blocks = (arena.block_bytes, arena.num_blocks, meta.block_tables.shape[1])
        where = (arena.slice_address(layer), blocks, arena.block_tokens)
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
        where: tuple[int, tuple[int, int, int], int],
    ) -> bytes:
        """`where` K and V go: the address, (bytes of a block, how many, width of the tables), and
        the tokens of a block."""
        d = heads.head_dim
        _same_rows(qkv, (heads.num_heads + 2 * heads.num_kv_heads) * d, meta)
        max_positions, half = rope.cos.shape
        if qk_norm is not None:
            _same(qkv, qk_norm.q_weight, d)
            _same(qkv, qk_norm.k_weight, d)
        address, blocks, block_tokens = where
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
            0.0 if qk_norm is None else qk_norm.eps,
        )

    def attend(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        out = torch.empty(meta.num_rows, heads.num_heads * heads.head_dim, dtype=q.dtype)
        q = queries_of(q, heads, meta)
        call = self._attend_call(q, out.data_ptr(), heads, cache, layer, meta, scale)
        if self._of(q).attend(call, torch.get_num_threads()):
            raise IndexError("attend: a row's context lies outside its block table")
        return out

    def _attend_call(
        self,
        q: Tensor,
        out: int,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> bytes:
        """`q`, as `queries_of` gives it, must live until the kernel has run. `out`: an address."""
        arena = self._arena_of(cache, heads, q.dtype)
        return ATTEND_CALL.pack(
            q.data_ptr(),
            out,
            arena.slice_address(layer),
            *self._step_addresses(meta),
            arena.block_bytes,
            arena.num_blocks,
            meta.block_tables.shape[1],
            meta.num_sequences,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            arena.block_tokens,
            scale,
        )


def _same(x: Tensor, weight: Tensor, width: int) -> None:
    if weight.dtype is not x.dtype or weight.shape[0] != width or not weight.is_contiguous():
        raise ValueError(
            f"norm weight must be contiguous [{width}] {x.dtype}, "
            f"got {list(weight.shape)} {weight.dtype}"
        )


def queries_of(q: Tensor, heads: HeadShape, meta: StepMeta) -> Tensor:
    """[T, num_heads, head_dim] or [T, num_heads * head_dim] -> the latter, contiguous."""
    width = heads.num_heads * heads.head_dim
    q = q.reshape(-1, width).contiguous()
    _same_rows(q, width, meta)
    return q


def _same_rows(x: Tensor, width: int, meta: StepMeta) -> None:
    if x.shape[0] != meta.num_rows or x.shape[1] != width:
        raise ValueError(f"expected [{meta.num_rows}, {width}], got {list(x.shape)}")


class _Arena:
    """Where the slices of a KVCache lie, found to fit the heads and the type of the rows."""

    __slots__ = (
        "_base",
        "_num_layers",
        "_slice_stride",
        "block_bytes",
        "block_tokens",
        "num_blocks",
    )

    def __init__(self, cache: KvCache, heads: HeadShape, dtype: torch.dtype) -> None:
        layout, blocks = cache.layout, cache.blocks
        check_layout(layout)
        shape = (blocks.shape[0], layout.num_layers, layout.slice_elements)
        same = layout.num_kv_heads == heads.num_kv_heads and layout.head_dim == heads.head_dim
        if not same or blocks.dtype is not dtype or blocks.shape != shape or blocks.stride(2) != 1:
            raise ValueError(f"the KVCache ({layout}) does not fit {heads} in {dtype}")
        if heads.num_heads % heads.num_kv_heads:
            raise ValueError(f"{heads}: num_heads must be a multiple of num_kv_heads")
        size = blocks.element_size()
        self._base = blocks.data_ptr()
        self._num_layers = layout.num_layers
        self._slice_stride = blocks.stride(1) * size
        self.block_bytes = blocks.stride(0) * size
        self.num_blocks = blocks.shape[0]
        self.block_tokens = layout.block_tokens

    def slice_address(self, layer: int) -> int:
        """Of the layer's slice in block 0."""
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
