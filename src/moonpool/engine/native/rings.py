"""The functions of ring.cpp and hand.cpp: bytes through memory shared with another process.

Owns their C signatures. The GIL is free while one of them runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.engine.native.library import Call
from moonpool.engine.native.sources import open_library

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_MOVE = (_POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, _INT64)


class Waiter(ctypes.Structure):
    """How long one side of a ring looks before it sleeps; see ring.h."""

    _fields_ = (("spin_ns", _INT64), ("shy", _INT64))


@dataclass(frozen=True, slots=True)
class Rings:
    """`write` and `read` move one end; `serve` is an attention worker's side of steps; the others
    measure."""

    write: Call
    read: Call
    serve: Call
    hand_size: Call
    ask: Callable[..., float]
    bare_ping: Callable[..., float]


def open_rings() -> Rings | None:
    """None where the kernels are not built or do not load."""
    library = open_library()
    if library is None:
        return None
    write, read = library["moonpool_ring_write"], library["moonpool_ring_read"]
    serve, size = library["moonpool_hand_serve"], library["moonpool_hand_size"]
    for call, arguments in ((write, _MOVE), (read, _MOVE), (serve, (_POINTER, _INT64))):
        call.argtypes = arguments
        call.restype = _INT64
    size.argtypes, size.restype = (_INT,), _INT64
    ask, bare = library["moonpool_ring_ask"], library["moonpool_bare_ping"]
    ask.argtypes = (_POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _POINTER)
    bare.argtypes = (_POINTER, _POINTER, _INT64, _INT64, _INT, _INT)
    ask.restype = bare.restype = ctypes.c_double
    return Rings(write, read, serve, size, ask, bare)
