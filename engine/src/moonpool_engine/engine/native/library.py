"""Opens the built library and binds its functions for one instruction set.

The C signatures of the kernels are here. `native.build` compiles the library, at installation or on
request.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from moonpool_engine.engine.native.build import (
    BUILD_LINE,
    ISA_FLAGS,
    NO_ISA,
    best_isa,
    find_library,
    usable_isas,
)

ISAS = tuple(ISA_FLAGS)
"""In rising order: a CPU that supports one supports all before it."""

Call = Callable[..., int]

_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (*[_POINTER] * 4, *[_INT64] * 3, _INT),
    "linear_int8": (*[_POINTER] * 5, *[_INT64] * 3, _INT),
    "linear_quantized": (_INT, *[_POINTER] * 4, *[_INT64] * 4, _INT, _INT),
    "repack": (_INT, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT),
    "rms_norm": (*[_POINTER] * 3, _INT64, _INT64, _FLOAT, _INT),
    "add_rms_norm": (*[_POINTER] * 4, _INT64, _INT64, _FLOAT, _INT),
    "glu": (_POINTER, _POINTER, _INT64, _INT64, _INT, _FLOAT, _FLOAT, _INT),
    "soft_cap": (_POINTER, _POINTER, _INT64, _FLOAT, _INT),
    "rope_store": (ctypes.c_char_p, _INT),
    "rope": (ctypes.c_char_p, _INT),
    "store": (ctypes.c_char_p, _INT),
    "attend": (ctypes.c_char_p, _INT),
    "delta_rule": (ctypes.c_char_p, _INT),
    "attend_part": (ctypes.c_char_p, _INT),
    "merge": (ctypes.c_char_p, _INT),
}
# The structs of calls.h, rowwise.cpp and attention.cpp: pointers, integers, a float.
ROPE_CALL = struct.Struct("@11P11qf")
DELTA_CALL = struct.Struct("@10P12qf")
STORE_CALL = struct.Struct("@5P9q")
ATTEND_CALL = struct.Struct("@7P11q2f")
PART_TAIL = struct.Struct("=5Q")  # the struct that follows an ATTEND_CALL
MERGE_CALL = struct.Struct("@5P4q")
STATE_FLOATS = 32  # floats in the state of one row and head, in addition to two times value_dim
_TYPES = {torch.float32: "f32", torch.bfloat16: "b16"}


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be used here; the message is one line with the reason."""


class Kernels:
    """The functions for one element type and one instruction set."""

    __slots__ = (
        "add_rms_norm",
        "attend",
        "attend_part",
        "delta_rule",
        "glu",
        "linear",
        "linear_int8",
        "linear_quantized",
        "merge",
        "repack",
        "rms_norm",
        "rope",
        "rope_store",
        "soft_cap",
        "store",
    )

    def __init__(self, library: ctypes.CDLL, kind: str, isa: str) -> None:
        self.linear = _bind(library, "linear", kind, isa)
        self.linear_int8 = _bind(library, "linear_int8", kind, isa)
        self.linear_quantized = _bind(library, "linear_quantized", kind, isa)
        self.repack = _bind(library, "repack", "", "")
        self.rms_norm = _bind(library, "rms_norm", kind, isa)
        self.add_rms_norm = _bind(library, "add_rms_norm", kind, isa)
        self.glu = _bind(library, "glu", kind, isa)
        self.soft_cap = _bind(library, "soft_cap", "", isa)
        self.rope_store = _bind(library, "rope_store", kind, isa)
        self.rope = _bind(library, "rope", kind, isa)
        self.store = _bind(library, "store", kind, isa)
        self.attend = _bind(library, "attend", kind, isa)
        self.delta_rule = _bind(library, "delta_rule", kind, isa)
        self.attend_part = _bind(library, "attend_part", kind, isa)
        self.merge = _bind(library, "merge", kind, isa)


def _bind(library: ctypes.CDLL, name: str, kind: str, isa: str) -> Call:
    function = library["_".join(filter(None, ("moonpool", name, kind, isa)))]
    function.argtypes = _SIGNATURES[name]
    function.restype = _INT
    return function


def open_kernels(isa: str | None = None) -> tuple[str, dict[torch.dtype, Kernels]]:
    """Binds the functions for `isa`, by default the best that the CPU supports.

    Returns the instruction set and the functions by dtype. Raises NativeUnavailableError.
    """
    path = find_library()
    if path is None:
        raise NativeUnavailableError(
            f"the kernels are not built; with a C++ compiler, `{BUILD_LINE}` builds them"
        )
    library, usable = open_file(path)
    chosen = isa or usable[-1]
    if chosen not in ISAS:
        raise NativeUnavailableError(f"no kernels for {chosen!r}: use one of {', '.join(ISAS)}")
    if chosen not in usable:
        raise NativeUnavailableError(
            f"this CPU and its kernels have no {chosen}: they have {', '.join(usable)}"
        )
    return chosen, {dtype: Kernels(library, kind, chosen) for dtype, kind in _TYPES.items()}


def open_file(path: Path) -> tuple[ctypes.CDLL, tuple[str, ...]]:
    """The library, and the instruction sets that it has for this CPU: at least one."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"the built kernels do not load: {error}") from error
    if not best_isa(library):
        raise NativeUnavailableError(NO_ISA)
    usable = usable_isas(library)
    if not usable:
        raise NativeUnavailableError(
            f"{path.name} was built for another CPU: run `{BUILD_LINE}` on this machine"
        )
    return library, usable


def why_unavailable() -> str | None:
    """Returns None if the kernels can be used here, or one line with the reason."""
    try:
        open_kernels()
    except NativeUnavailableError as error:
        return str(error)
    return None
