"""The choice of device and dtype. This module imports torch only where there may be a GPU, because
a head chooses a device and computes nothing."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

from moonpool.cores import cpu_flags

_BFLOAT16 = frozenset({"avx512_bf16", "amx_tile"})
"""Flags of CPUs that multiply bfloat16 natively, by the kernels here."""


class DeviceError(ValueError):
    """The device cannot be used here; the message is one line with the reason and the remedy."""


def resolve_device(wanted: str) -> str:
    """ "auto" becomes "cuda" where torch finds a GPU, else "cpu"."""
    if wanted != "auto":
        return wanted
    return "cuda" if _may_have_gpu() and _has_gpu() else "cpu"


def check_device(device: str) -> None:
    """Raises `DeviceError` where the device cannot be used."""
    if device != "cuda" or _has_gpu():
        return
    import torch

    built = torch.version.cuda is not None
    why = "sees no GPU: check `nvidia-smi`" if built else "was built without CUDA"
    raise DeviceError(f"engine.device is cuda, but the torch here {why}; or use --device cpu")


def resolve_dtype(wanted: str, device: str = "cpu") -> str:
    """ "auto" becomes bfloat16 where the device multiplies it natively, else float32.

    Without native support bfloat16 is slower than float32 and less exact.
    """
    if wanted != "auto":
        return wanted
    native = device == "cuda" or bool(_BFLOAT16 & cpu_flags())
    return "bfloat16" if native else "float32"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _may_have_gpu() -> bool:
    """Whether torch was built for GPUs: its import takes 1.5 s of CPU, its version's nothing."""
    if "torch" in sys.modules:
        return True
    found = importlib.util.find_spec("torch")  # this call does not import torch
    if found is None or found.origin is None:
        return True  # importing torch will report why it is missing
    try:
        built = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    except OSError:
        return True
    return built.get("cuda", "unknown") is not None or built.get("hip") is not None
