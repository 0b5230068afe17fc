"""Linears on a GPU whose rows do not see each other.

Two kinds: our Triton kernel, which adds up along the features in order, and cuBLASLt, which is half
as fast again with many rows (and takes longer to be called). It adds up in the same order as long
as it may not split that sum; which it is told, and which is checked here for every shape of weight,
bit by bit over several numbers of rows, before it is trusted.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from moonpool.engine.cuda import kernels
from moonpool.engine.ops import Linear

logger = logging.getLogger(__name__)

MANY_ROWS = 512
"""Up to so many rows the Triton kernel is called; above, cuBLASLt where it is trusted."""
CHECKED_ROWS = (513, 576, 640, 777, 1000, 1024, 1500, 2048, 3000, 4096)


class Linears:
    """Chooses the kind for each weight. Tells torch, for the whole process, not to split sums."""

    def __init__(self) -> None:
        self._trusted: dict[tuple[int, int, bool], bool] = {}
        torch.backends.cuda.preferred_blas_library("cublaslt")
        # Of two: whether sums may be rounded in between, and whether they may be split.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)

    def choose(self, weight: Tensor, bias: Tensor | None) -> Linear:
        own = TritonLinear(weight, bias)
        if weight.dtype != torch.bfloat16:
            return own
        outs, width = weight.shape
        shape = (outs, width, bias is not None)
        mixed = MixedLinear(weight, bias, own)
        if shape not in self._trusted:
            self._trusted[shape] = _agree(own, mixed, weight)
            if not self._trusted[shape]:
                logger.info("linear %s: cuBLASLt does not add up in order, Triton is used", shape)
        return mixed if self._trusted[shape] else own


def _agree(own: Linear, mixed: Linear, weight: Tensor) -> bool:
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (max(CHECKED_ROWS), weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
    expected = own(x)
    return all(torch.equal(mixed(x[:rows]), expected[:rows]) for rows in CHECKED_ROWS)


class MixedLinear:
    """Few rows by Triton, many by cuBLASLt."""

    def __init__(self, weight: Tensor, bias: Tensor | None, own: TritonLinear) -> None:
        self._weight = weight
        self._bias = bias
        self._own = own

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= MANY_ROWS:
            return self._own(x)
        return F.linear(x, self._weight, self._bias)


class TritonLinear:
    """A weight [out, in] as it is, and its bias."""

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
    """Rows, outs and features of a tile, warps, stages of the pipeline: as measured on an H200.
    None of them changes a bit: each product is added to its sum in the order of the features."""
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
    """float32 is meant as such, not as the tensor cores' shorter kind."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
