"""Operations in C++, bound by ctypes: batch-invariant GEMM, paged attention, row-wise kernels.

The engine has its own kernels because most library kernels are not batch-invariant, and because
oneDNN reads weights at 0.35 of the memory bandwidth at batch 1, where these reach 0.89
(docs/decisions/cpu-kernels.md). `NativeOps` in `native.ops` implements `Ops`. Importing this
package does not import torch, so that `setup.py` can build the kernels.
"""

from __future__ import annotations


def available() -> str | None:
    """Returns None if the kernels can be used here, or one line with the reason."""
    from moonpool_engine.engine.native.library import why_unavailable

    return why_unavailable()
