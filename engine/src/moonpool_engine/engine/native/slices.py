"""Binds slices.cpp: copies KVCache slices and computes their checksums in one pass.

Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from moonpool_engine.engine.native.build import open_library

Call = Callable[..., int]
_POINTER, _INT64, _INT, _BYTES = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "name": (_POINTER, _INT64, _POINTER, _POINTER, *[_INT64] * 4, _POINTER),
    "copy": (_BYTES, _INT64, _BYTES, _POINTER, _INT64, _POINTER),
    "move": (_POINTER, _POINTER, _POINTER, _INT64, _INT64),
    "receive": (_INT, _BYTES, _INT64, _BYTES, _INT64, _POINTER),
    "send": (_INT, _BYTES, _INT64, _BYTES, _INT64, _POINTER, *[_INT64] * 3, _POINTER),
}


@dataclass(frozen=True, slots=True)
class NativeSliceCalls:
    """Functions of slices.cpp, which documents arguments and results. They release the GIL."""

    name: Call
    copy: Call
    move: Call
    receive: Call
    send: Call


def open_slices(isa: str | None = None) -> NativeSliceCalls | None:
    """Binds the functions for `isa`, by default the CPU's best. None if the kernels are not built
    or do not load."""
    library = open_library()
    if library is None:
        return None
    library.moonpool_isa.restype = ctypes.c_char_p
    chosen = isa or library.moonpool_isa().decode()
    if not chosen:
        return None
    calls = {}
    for name, arguments in _SIGNATURES.items():
        calls[name] = library[f"moonpool_slices_{name}_{chosen}"]
        calls[name].argtypes = arguments
        calls[name].restype = _INT
    return NativeSliceCalls(**calls)
