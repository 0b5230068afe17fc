"""Writes a GGUF file in another format: `-m benchmarks.requantized_gguf SOURCE FORMAT FILE`.

llama.cpp converts the file, so the Python must have llama-cpp-python. FORMAT is a kind of file as
llama.cpp names it: Q4_0, Q8_0, Q4_K_M. If a tensor's rows do not fit a format with blocks of 256,
it gets the format that llama.cpp chooses instead. Losses by the source's own quantisation remain.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

USAGE = "usage: python -m benchmarks.requantized_gguf SOURCE FORMAT FILE"


def write_requantized(source: Path, kind: str, path: Path) -> None:
    """Raises ValueError for a format or a source that llama.cpp does not know."""
    import llama_cpp

    file_kind = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
    if file_kind is None:
        raise ValueError(f"llama.cpp has no format {kind!r}; Q4_0, Q8_0 and Q4_K_M are some of its")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = file_kind, True
    paths = str(source).encode(), str(path).encode()
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)) != 0:
        raise ValueError(f"llama.cpp could not write {source} as {kind}; its words are above")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(USAGE)
    try:
        write_requantized(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except ImportError:
        sys.exit("llama-cpp-python is not installed for this Python")
    except ValueError as error:
        sys.exit(str(error))
