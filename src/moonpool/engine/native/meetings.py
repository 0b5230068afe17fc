"""The functions of meeting.cpp: what each rank has, to all ranks, through shared memory.

Owns their C signatures. The GIL is free while one of them runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from moonpool.engine.native.library import Call
from moonpool.engine.native.sources import open_library

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class Meetings:
    """`size`: bytes of memory, 0 for too many ranks. `meet`: one piece of each; `end`: for all."""

    size: Call
    meet: Call
    end: Call


def open_meetings() -> Meetings | None:
    """None where the kernels are not built or do not load."""
    library = open_library()
    if library is None:
        return None
    size, meet, end = (library[f"moonpool_meet{name}"] for name in ("ing_size", "", "ing_end"))
    size.argtypes = (_INT64, _INT64)
    meet.argtypes = (_POINTER, *[_INT64] * 4, _POINTER, _POINTER, _INT64, _POINTER, _INT64)
    size.restype = meet.restype = _INT64
    end.argtypes, end.restype = (_POINTER,), None
    return Meetings(size, meet, end)
