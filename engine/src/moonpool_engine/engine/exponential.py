"""exp and sigmoid of float32, whose bits do not depend on an element's place in the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

LN2 = (0.693359375, -2.12194440e-4)  # high and low part
EXP_TERMS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Tensor) -> Tensor:
    """exp of float32 with relative error 1e-7, exactly 0 below -87, finite above 88.

    The bits of torch's elementwise functions depend on an element's place in the tensor (vector
    body or scalar tail) and on the thread count. Single multiplications and additions round alike
    everywhere.
    """
    kept = x.clamp(-87.0, 88.0)
    powers = (kept * 1.4426950408889634).round_()
    rest = kept - powers * LN2[0] - powers * LN2[1]
    terms = rest * 1.9875691500e-4
    for term in EXP_TERMS:
        terms = (terms + term) * rest
    scale = ((powers.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, (terms * rest + rest + 1.0) * scale)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of float32."""
    return 1 / (1 + exp(-x))
