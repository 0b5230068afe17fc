"""Chooses the operations of workers whose attention call is taken apart."""

from __future__ import annotations

from moonpool.config import Quantization
from moonpool.engine import native
from moonpool.engine.ops import SplitOps
from moonpool.engine.reference_split import ReferenceSplitOps


def choose_split_ops(quantization: Quantization = "none") -> SplitOps:
    """Those that `choose_ops` would choose on the CPU, so that their blocks can be shared."""
    if native.available() is not None:
        return ReferenceSplitOps(quantization)
    from moonpool.engine.native.split import NativeSplitOps

    return NativeSplitOps(quantization=quantization)
