"""What the native library is made of, what it is called and where it lies.

Its name carries a hash of sources and flags, so a stale library is never loaded.
Imports the standard library only: `setup.py` builds without torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("linear.cpp", "linear_int8.cpp", "rowwise.cpp", "attention.cpp", "slices.cpp")
PLAIN_SOURCES = (
    "cpu.cpp",
    "ring.cpp",
    "hand.cpp",
    "meeting.cpp",
)  # the same for every instruction set
HEADERS = ("simd.h", "panels.h", "calls.h", "ring.h")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
ISA_FLAGS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
}
# No contraction: whether a * b + c is fused must be written down, not the compiler's choice.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
STEM = "_kernels-"


def library_name() -> str:
    """File name of the library that belongs to the sources as they are now."""
    state = hashlib.sha256(repr((FLAGS, ISA_FLAGS)).encode())
    for name in (*HEADERS, *PLAIN_SOURCES, *SOURCES):
        state.update((HERE / name).read_bytes())
    return f"{STEM}{state.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Where a library goes if the package folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moonpool" / "native"


def find_library() -> Path | None:
    """The built library of these sources, if there is one."""
    name = library_name()
    places = (HERE / name, cache_folder() / name)
    return next((place for place in places if place.is_file()), None)


def open_library() -> ctypes.CDLL | None:
    """None where it is not built or does not load."""
    path = find_library()
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
