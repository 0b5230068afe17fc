"""Binds slices.cpp: copies KVCache slices and computes their checksums in one pass.

Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from moonpool_engine.engine.native.build import open_library, usable_isas

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
    """Functions of slices.cpp, which documents arguments and results. All calls release the GIL."""

    name: Call
    copy: Call
    move: Call
    receive: Call
    send: Call


def open_slices(isa: str | None = None) -> NativeSliceCalls | None:
    """Binds and returns the functions for `isa`, by default the best that there is; returns None if
    the kernels are not built, do not load, or lack such functions for this CPU."""
    library = open_library()
    usable = () if library is None else usable_isas(library)
    chosen = isa or next(reversed(usable), None)
    if library is None or chosen not in usable:
        return None
    calls = {}
    for name, arguments in _SIGNATURES.items():
        calls[name] = library[f"moonpool_slices_{name}_{chosen}"]
        calls[name].argtypes = arguments
        calls[name].restype = _INT
    return NativeSliceCalls(**calls)
