"""Limits of this machine, measured by plain loops in the same run as the engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch


def has_bf16_products() -> bool:
    """Whether torch multiplies bfloat16 matrices by instructions. Without AVX-512 torch emulates
    these products, a hundred times slower than those of float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def gemm_flops_per_s(dtype: torch.dtype, size: int = 2048, repeats: int = 6) -> float:
    """The best rate of a square matrix product by torch (oneDNN or MKL), with torch's threads."""
    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    best_s = best_of(repeats, lambda: torch.mm(a, b))
    return 2.0 * size**3 / best_s


def read_bytes_per_s(num_bytes: int = 512 << 20, repeats: int = 6) -> float:
    """The best rate of summing an array far larger than the caches, on one thread."""
    data = np.ones(num_bytes // 8, dtype=np.int64)
    tensor = torch.from_numpy(data)
    rates = [
        num_bytes / best_of(repeats, lambda: tensor.sum()),
        num_bytes / best_of(repeats, data.sum),
    ]
    return max(rates)


def best_of(repeats: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    run()
    best_s = float("inf")
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
