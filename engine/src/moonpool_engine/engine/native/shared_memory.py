"""C signatures of ring.cpp, attention_step.cpp and all_gather.cpp: messages through shared memory.

ring.cpp moves bytes through a ring buffer, attention_step.cpp is the attention executor over two
rings, and all_gather.cpp is an all-gather between ranks. Every function releases the GIL while it
runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from moonpool_engine.engine.native.build import open_library
from moonpool_engine.engine.native.library import Call

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_MOVE = (_POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, _INT64)


class Waiter(ctypes.Structure):
    """How long one side of a ring spins before it sleeps; see ring.h."""

    _fields_ = (("spin_ns", _INT64), ("shy", _INT64))


@dataclass(frozen=True, slots=True)
class Rings:
    """Functions of ring.cpp and attention_step.cpp.

    `write` and `read` move bytes at one end of a ring. `serve` runs an attention worker's side of
    steps. `executor_size` gives the sizes of the C++ structs. `ask` and `bare_ping` are only for
    measurements.
    """

    write: Call
    read: Call
    serve: Call
    executor_size: Call
    ask: Callable[..., float]
    bare_ping: Callable[..., float]


def open_rings() -> Rings | None:
    """Binds and returns the ring functions, or returns None if the kernels are not built or do not
    load."""
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


@dataclass(frozen=True, slots=True)
class ShmAllgather:
    """Functions of all_gather.cpp.

    `size` returns the bytes of memory needed, or 0 for too many ranks. `gather` exchanges one piece
    for each rank. `abort` ends all calls of `gather` permanently.
    """

    size: Call
    gather: Call
    abort: Call


def open_allgather() -> ShmAllgather | None:
    """Binds and returns the all-gather, or returns None if the kernels are not built or do not
    load."""
    library = open_library()
    if library is None:
        return None
    size, gather = library["moonpool_meeting_size"], library["moonpool_meet"]
    abort = library["moonpool_meeting_end"]
    size.argtypes = (_INT64, _INT64)
    gather.argtypes = (_POINTER, *[_INT64] * 4, _POINTER, _POINTER, _INT64, _POINTER, _INT64)
    size.restype = gather.restype = _INT64
    abort.argtypes, abort.restype = (_POINTER,), None
    return ShmAllgather(size, gather, abort)
