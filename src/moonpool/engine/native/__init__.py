"""Ops in C++: our own row-invariant GEMM, paged attention and row-wise kernels, through ctypes.

`available` says whether they can be used here; `native.ops.NativeOps` is the `Ops`. Importing this
package imports no torch, so that `setup.py` can build the kernels.
"""

from __future__ import annotations


def available() -> str | None:
    """None if the kernels can be used here, else one line that says why not."""
    from moonpool.engine.native.library import why_unavailable

    return why_unavailable()
