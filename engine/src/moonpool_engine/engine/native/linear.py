"""Linear layers on the C++ kernels: packing of weights, and the memory for packed weights.

A decode step reads every weight once, in order. On 4 KiB pages the prefetcher and the TLB interrupt
that stream at each page end; on 2 MiB pages it comes close to memory bandwidth. The checks here
keep a wrong tensor from becoming a wrong address.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from moonpool_engine.engine.native.library import Call
from moonpool_engine.engine.quantized.int8 import quantize
from moonpool_engine.engine.slices import LANE_BYTES

CHUNK_BYTES = 64 << 20
ALIGN_BYTES = 64


class PackedMemory:
    """Allocates zeroed pieces of anonymous mappings, on large pages if the system has them.

    A mapping lives as long as any view of it. Untouched pages cost nothing.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """A tensor [num_bytes] uint8, aligned to a cache line."""
        if num_bytes > self._chunk.numel() - self._used_bytes:
            self._chunk = _map(max(num_bytes, CHUNK_BYTES))
            self._used_bytes = 0
        piece = self._chunk[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return piece


def _map(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


PANEL = 32
"""Adjacent outputs in a packed weight; panels.h has the same number."""


class NativeLinear:
    """Computes `y = x @ weight.T + bias` for x [T, in].

    The weight is packed as [out / 32][lanes of in][32], where a lane is 4 bytes of `in`; the bias
    is float32, padded to a multiple of 32.
    """

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


class NativeInt8Linear:
    """The product with 8-bit weights that `engine.quantized.int8` defines, for x [T, in].

    Weights are [out / 32][lanes of in][32][2] int8, scales [out / 32][groups][32] float32.
    """

    __slots__ = ("_bias", "_call", "_scales", "_weight", "dtype", "in_features", "out_features")

    def __init__(
        self, call: Call, weight: Tensor, bias: Tensor | None, memory: PackedMemory
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._call = call
        rounded, scales = quantize(weight)
        panels, lanes = -(-self.out_features // PANEL), -(-self.in_features // 2)
        padded = rounded.new_zeros(panels * PANEL, lanes * 2)
        padded[: self.out_features, : self.in_features] = rounded
        flat = padded.view(torch.int16).view(panels, PANEL, lanes)
        packed = memory.take(padded.numel()).view(torch.int16).view(panels, lanes, PANEL)
        self._weight = packed.copy_(flat.transpose(1, 2))
        all_scales = scales.new_zeros(panels * PANEL, scales.shape[1])
        all_scales[: self.out_features] = scales
        self._scales = all_scales.view(panels, PANEL, -1).transpose(1, 2).contiguous()
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(panels * PANEL)
            self._bias[: self.out_features] = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if width != self.in_features or x.dtype is not self.dtype:
            raise ValueError(
                f"linear takes [T, {self.in_features}] {self.dtype}, got {list(x.shape)} {x.dtype}"
            )
        x = x.contiguous()
        y = torch.empty(rows, self.out_features, dtype=self.dtype)
        self._call(
            x.data_ptr(),
            self._weight.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            self.out_features,
            torch.get_num_threads(),
        )
        return y
