"""Which dtype to compute in when nobody says."""

from __future__ import annotations

import torch


def resolve_dtype(wanted: str, device: str = "cpu") -> str:
    """ "auto" becomes bfloat16 where the device multiplies it natively, and float32 elsewhere:
    there, bfloat16 would be slower than float32 and no more exact."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bfloat16"
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, name, lambda: False)() for name in probes)
    return "bfloat16" if native else "float32"
