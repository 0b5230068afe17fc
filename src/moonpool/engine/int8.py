"""Weights of 8 bits: what they are, and their product in plain torch.

Owns the rounding of weights and of rows. `in` is cut into groups of `GROUP`; of each, an output has
8-bit weights and one scale, and a row is given 16 bits and one scale of its own (more than bfloat16
has). Sums within a group are whole numbers, exact in any order; over the groups they are added in
rising order, one operation at a time. So the native kernels give these bits, and a row's bits do
not depend on its neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 256
"""Of `in`; linear_int8.cpp has the same number."""
LARGEST_WEIGHT, LARGEST_INPUT = 127.0, 32767.0
LEAST = 1e-30
"""A row whose group is smaller than this counts as nothing: its scale could not be inverted."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] and scales [out, groups] float32."""
    groups = _grouped(weight.float())
    scales = groups.abs().amax(-1) / LARGEST_WEIGHT
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    rounded = (groups * inverse.unsqueeze(-1)).round_().clamp_(-LARGEST_WEIGHT, LARGEST_WEIGHT)
    return rounded.to(torch.int8).flatten(1)[:, : weight.shape[1]].contiguous(), scales


class Int8Linear:
    """`y = x @ (weights * scales).T + bias`: the meaning, slow and portable."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, self._scales = quantize(weight)
        # float64 holds every sum of a group exactly, whatever order it is added in.
        self._weights = _grouped(rounded.double()).permute(1, 2, 0).contiguous()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = _rounded_rows(x)
        sums = torch.zeros(x.shape[0], self._scales.shape[0])
        for group, weights in enumerate(self._weights):
            whole = (rows[:, group].double() @ weights).float()
            sums += whole * (scales[:, group, None] * self._scales[:, group])
        if self._bias is not None:
            sums += self._bias
        return sums.to(x.dtype)


def _rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [T, groups, GROUP] and scales [T, groups]; NaN where a number is not finite."""
    groups = _grouped(x.float())
    most = groups.abs().amax(-1)
    # `LARGEST_INPUT / most` would be a reciprocal and a product, rounded twice.
    inverse = torch.where(most > LEAST, torch.full_like(most, LARGEST_INPUT).div_(most), 0.0)
    rows = (groups * inverse.unsqueeze(-1)).round_()
    return rows.nan_to_num_(0.0, 0.0, 0.0), most / LARGEST_INPUT + (groups * 0.0).sum(-1)


def _grouped(x: Tensor) -> Tensor:
    """[n, in] -> [n, groups, GROUP], the last group filled up with zeros."""
    groups: Tensor = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return groups
