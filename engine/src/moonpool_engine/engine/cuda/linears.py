"""Batch-invariant linear layers on a GPU.

There are two kinds of linear operations. Our Triton kernel adds along the features in order.
cuBLASLt is 1.5 times as fast with many rows, but slower to call. cuBLASLt adds in a fixed order
only if it may not split the sum (split-K), so this module forbids that in torch. Before cuBLASLt is
used, every weight shape is verified bit for bit at several numbers of rows.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from moonpool_engine.engine.cuda import kernels
from moonpool_engine.engine.ops import Linear

logger = logging.getLogger(__name__)

MANY_ROWS = 512
"""Up to this number of rows the Triton kernel runs; above it cuBLASLt, where it is verified."""
CHECKED_ROWS = (513, 576, 640, 777, 1000, 1024, 1500, 2048, 3000, 4096)


class Linears:
    """Chooses the kind for each weight. Forbids split-K in torch for the whole process."""

    def __init__(self) -> None:
        self._verified: dict[tuple[int, int, bool], bool] = {}
        torch.backends.cuda.preferred_blas_library("cublaslt")
        # Two switches: reduced precision within a sum, and split-K.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)

    def choose(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The linear layer for weight [out, in] and bias [out]; verifies new shapes."""
        own = TritonLinear(weight, bias)
        if weight.dtype != torch.bfloat16:
            return own
        outs, width = weight.shape
        shape = (outs, width, bias is not None)
        mixed = MixedLinear(weight, bias, own)
        if shape not in self._verified:
            self._verified[shape] = _agree(own, mixed, weight)
            if not self._verified[shape]:
                logger.info("linear %s: cuBLASLt does not add up in order, Triton is used", shape)
        return mixed if self._verified[shape] else own


def _agree(own: Linear, mixed: Linear, weight: Tensor) -> bool:
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (max(CHECKED_ROWS), weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
    expected = own(x)
    return all(torch.equal(mixed(x[:rows]), expected[:rows]) for rows in CHECKED_ROWS)


class MixedLinear:
    """Uses Triton up to MANY_ROWS rows and cuBLASLt above. x: [T, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, own: TritonLinear) -> None:
        self._weight = weight
        self._bias = bias
        self._own = own

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= MANY_ROWS:
            return self._own(x)
        return F.linear(x, self._weight, self._bias)


class TritonLinear:
    """`y = x @ weight.T + bias` by the Triton kernel. weight: [out, in]; x: [T, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        outs = self._weight.shape[0]
        y = x.new_empty(rows, outs)
        block_m, block_n, block_k, warps, stages = _tiles(x, outs)
        grid = (triton.cdiv(rows, block_m) * triton.cdiv(outs, block_n),)
        kernels.linear_kernel[grid](
            x.contiguous(),
            self._weight,
            y if self._bias is None else self._bias,
            y,
            rows,
            width,
            outs,
            HAS_BIAS=self._bias is not None,
            PRECISION=precision(x),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=8,
            num_warps=warps,
            num_stages=stages,
        )
        return y


def _tiles(x: Tensor, outs: int) -> tuple[int, int, int, int, int]:
    """(rows, outs, features) of a tile, warps, and pipeline stages, as measured on an H200.

    No choice changes a bit, since every sum runs in the order of the features.
    """
    rows = x.shape[0]
    if x.dtype == torch.float32:
        return 64, 32, 32, 4, 2
    if rows <= 128:
        if outs >= 16384:
            return (64, 64, 64, 4, 6) if rows <= 64 else (128, 128, 64, 8, 4)
        if rows <= 16:
            return 16, 32, 128, 4, 5
        return (64, 64, 128, 4, 4) if outs > 4096 else (64, 32, 128, 4, 4)
    return (128, 256, 64, 8, 4) if rows * outs >= 2**21 else (128, 128, 64, 8, 4)


def precision(x: Tensor) -> str:
    """Full float32 precision for float32 inputs, instead of the tensor cores' tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
