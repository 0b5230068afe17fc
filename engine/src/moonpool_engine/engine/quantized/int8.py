"""Quantization to 8-bit weights: the rounding, and the product in plain torch.

The input features are divided into groups of `GROUP`. Per group an output has 8-bit weights and one
scale; a row has 16-bit numbers, finer than bfloat16, and one scale. Sums within a group are whole
numbers, which are exact in any order; groups are added in rising order. So the native kernels give
the same bits, and rows are independent (docs/decisions/quantised-weights.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 256
"""Input features per group; linear_int8.cpp has the same number."""
LARGEST_WEIGHT, LARGEST_INPUT = 127.0, 32767.0
LEAST = 1e-30
"""A row's group with no larger number counts as zero, since its scale has no finite inverse."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight [out, in] to int8 [out, in] and scales [out, groups] float32."""
    groups = _grouped(weight.float())
    scales = groups.abs().amax(-1) / LARGEST_WEIGHT
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    rounded = (groups * inverse.unsqueeze(-1)).round_().clamp_(-LARGEST_WEIGHT, LARGEST_WEIGHT)
    return rounded.to(torch.int8).flatten(1)[:, : weight.shape[1]].contiguous(), scales


class Int8Linear:
    """Computes `y = x @ (weights * scales).T + bias`: the slow and portable reference. x: [T,
    in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, self._scales = quantize(weight)
        # float64 holds every sum of a group exactly, whatever order it is added in.
        self._weights = _grouped(rounded.double()).permute(1, 2, 0).contiguous()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = rounded_rows(x)
        sums = torch.zeros(x.shape[0], self._scales.shape[0])
        for group, weights in enumerate(self._weights):
            whole = (rows[:, group].double() @ weights).float()
            sums += whole * (scales[:, group, None] * self._scales[:, group])
        if self._bias is not None:
            sums += self._bias
        return sums.to(x.dtype)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows as whole numbers [T, groups, GROUP] and scales [T, groups], NaN for non-finite
    rows."""
    groups = _grouped(x.float())
    most = groups.abs().amax(-1)
    # `LARGEST_INPUT / most` would be a reciprocal and a product, rounded twice.
    inverse = torch.where(most > LEAST, torch.full_like(most, LARGEST_INPUT).div_(most), 0.0)
    rows = (groups * inverse.unsqueeze(-1)).round_()
    return rows.nan_to_num_(0.0, 0.0, 0.0), most / LARGEST_INPUT + (groups * 0.0).sum(-1)


def _grouped(x: Tensor) -> Tensor:
    """[n, in] -> [n, groups, GROUP]; zeros pad the last group."""
    groups: Tensor = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return groups
