"""A linear with weights of 8 bits on our C++ kernel; `engine.int8` says what it computes.

Owns packing, and the checks that keep a wrong tensor from becoming a wrong address.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.int8 import quantize
from moonpool.engine.native.library import Call
from moonpool.engine.native.memory import PackedMemory

PANEL = 32
"""Outputs side by side in a packed weight; panels.h has the same number."""


class NativeInt8Linear:
    """Weights as [out / 32][lanes of in][32][2] int8, scales as [out / 32][groups][32] float32."""

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
