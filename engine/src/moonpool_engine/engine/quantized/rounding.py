"""Rounding of plain weights to 4 bits while they are loaded (`--quantization int4`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix, StoredRows

GROUP = 32
ROWS_AT_ONCE = 1024


def rounded_to_int4(weight: Tensor) -> Matrix:
    """A weight [out, in] as Q4_1; unchanged if `in` is not a multiple of 32.

    Each group of 32 neighbours gets a scale and a minimum, from the least to the greatest of the
    weights.
    """
    if weight.shape[1] % GROUP:
        return weight
    data = torch.cat([_rounded(rows) for rows in weight.split(ROWS_AT_ONCE)])
    return QuantizedMatrix((StoredRows(FORMATS["Q4_1"], data),), weight.dtype)


def _rounded(weight: Tensor) -> Tensor:
    """[rows, in] -> [rows, bytes] uint8."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    least = groups.amin(-1, keepdim=True).half()
    scale = ((groups.amax(-1, keepdim=True) - least.float()) / 15).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    numbers = ((groups - least.float()) * inverse).round_().clamp_(0, 15).to(torch.uint8)
    low, high = numbers.chunk(2, dim=-1)
    parts = (scale.view(torch.uint8), least.view(torch.uint8), low | (high << 4))
    return torch.cat(parts, dim=-1).flatten(1)
