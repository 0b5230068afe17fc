"""Compiles the kernels into one shared library: `python -m moonpool_engine.engine.native.build`.

Without `--all` it compiles only for this machine's best instruction set, which is a fifth of the
work. With `--all` it compiles for every instruction set, as a library for other machines needs.

The library's name carries a hash of sources and flags, so a stale library is never loaded. The hash
is also part of the block names: after an edit of a source, even of a comment, earlier blocks are
not found.

The module imports only the standard library, because `setup.py` uses it. Without a compiler the
command prints one line, and the engine runs on plain torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (
    "linear.cpp",
    "linear_int8.cpp",
    "linear_quantized.cpp",
    "rowwise.cpp",
    "attention.cpp",
    "slices.cpp",
    "delta.cpp",
)
# Compiled once for all instruction sets. attention_step.cpp is the attention executor,
# all_gather.cpp the all-gather of ranks, repack.cpp the loading of quantized weights.
PLAIN_SOURCES = ("cpu.cpp", "ring.cpp", "attention_step.cpp", "all_gather.cpp", "repack.cpp")
HEADERS = (
    "simd.h",
    "simd_x86.h",
    "simd_avx2.h",
    "simd_avx512.h",
    "simd_neon.h",
    "panels.h",
    "rounded.h",
    "quantized.h",
    "quantized_row.h",
    "calls.h",
    "ring.h",
    "fp8.h",
    "xxh3.h",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
ARCHITECTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    },
    "aarch64": {
        "neon": ("-march=armv8-a",),
        "neonbf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    },
}
"""The flags of each instruction set, in rising order."""
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def architecture() -> str | None:
    """Returns this machine's key in `ARCHITECTURES`, or None if the kernels do not know it."""
    return _MACHINES.get(platform.machine().lower())


ISA_FLAGS: dict[str, tuple[str, ...]] = ARCHITECTURES.get(architecture() or "", {})
"""Flags of this machine's instruction sets."""
# No contraction: the source decides whether a * b + c is fused, not the compiler.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
STEM = "_kernels-"


def library_name() -> str:
    """Returns the file name of the library that is built from the current sources for all
    instruction sets.

    A library for one instruction set has that after the hash: `_kernels-HASH-avx2.so`.
    """
    state = hashlib.sha256(repr((FLAGS, ISA_FLAGS)).encode())
    for name in (*HEADERS, *PLAIN_SOURCES, *SOURCES):
        state.update((HERE / name).read_bytes())
    return f"{STEM}{state.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """The folder for the library if the package folder is not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moonpool" / "native"


def find_library() -> Path | None:
    """Returns the path of the library for the current sources, or None if it is not built."""
    return next((path for place in (HERE, cache_folder()) for path in _built_in(place)), None)


def _built_in(folder: Path) -> list[Path]:
    """The libraries for the current sources, that for all instruction sets first."""
    whole = folder / library_name()
    return [whole] if whole.is_file() else sorted(folder.glob(f"{whole.stem}-*.so"))


def open_library() -> ctypes.CDLL | None:
    """Returns the loaded library, or None if it is not built or does not load."""
    path = find_library()
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # no OpenMP library in the system, and torch's is not loaded
        return _beside_torchs_openmp(path)


def _beside_torchs_openmp(path: Path) -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for openmp in Path(folder, "lib").glob("libgomp*.so*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(openmp))
                return ctypes.CDLL(str(path))
    return None


def best_isa(library: ctypes.CDLL) -> str:
    """Returns the best instruction set that this CPU supports and kernels exist for, or "" if there
    is none."""
    library.moonpool_isa.restype = ctypes.c_char_p
    best: bytes = library.moonpool_isa()
    return best.decode()


def usable_isas(library: ctypes.CDLL) -> tuple[str, ...]:
    """The instruction sets that this CPU has and the library was built for, in rising order."""
    known, best = tuple(ISA_FLAGS), best_isa(library)
    here = known[: known.index(best) + 1] if best else ()
    return tuple(isa for isa in here if hasattr(library, f"moonpool_slices_name_{isa}"))


BUILD_LINE = f"{sys.executable} -m moonpool_engine.engine.native.build"
COMPILERS = ("g++", "c++", "clang++")


class BuildError(RuntimeError):
    """The library could not be built; the message is one line."""


def build(folder: Path | None = None, everything: bool = False) -> Path:
    """Compiles the library unless it exists, and removes older ones. Raises BuildError.

    The default `folder` is the package's, or the user's cache if that is not writable.
    `everything`: whether to compile for all instruction sets of this architecture, not only for
    this CPU's best.
    """
    if architecture() is None:
        raise BuildError(
            f"the kernels need an x86-64 or 64-bit Arm CPU, this is {platform.machine()}"
        )
    target = (folder or _writable_folder()) / library_name()
    for built in _built_in(target.parent):
        if built == target or (not everything and is_for_this_cpu(built)):
            _remove_others(built)
            return built
    found = (shutil.which(name) for name in COMPILERS)
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder_name:
        work = Path(folder_name)
        isas = ISA_FLAGS
        if not everything:
            isa = _isa_of_this_cpu(compiler, work)
            isas = {isa: ISA_FLAGS[isa]}
            target = target.with_name(f"{target.stem}-{isa}.so")
        os.replace(compile_library(compiler, isas, work), target)
    _remove_others(target)
    return target


def is_for_this_cpu(built: Path) -> bool:
    try:
        library = ctypes.CDLL(str(built))
        return usable_isas(library)[-1:] == (best_isa(library),)
    except (OSError, AttributeError):  # the library of another machine, or no library at all
        return False


def _isa_of_this_cpu(compiler: str, work: Path) -> str:
    """Asks cpu.cpp, which asks the CPU. Raises BuildError if it has none of the sets."""
    probe = work / "cpu.so"
    _run(
        [compiler, "-O2", "-std=c++17", "-fPIC", "-shared", str(HERE / "cpu.cpp"), "-o", str(probe)]
    )
    isa = best_isa(ctypes.CDLL(str(probe)))
    if not isa:
        raise BuildError(NO_ISA)
    return isa


NO_ISA = "this CPU lacks AVX2, FMA or F16C (on Arm: NEON), which the kernels need"


def _remove_others(kept: Path) -> None:
    for old in kept.parent.glob(f"{STEM}*.so"):
        if old != kept:
            old.unlink(missing_ok=True)


def _writable_folder() -> Path:
    return HERE if os.access(HERE, os.W_OK) else cache_folder()


def compile_library(compiler: str, isas: Mapping[str, Sequence[str]], work: Path) -> Path:
    """Compiles every source for each of `isas`, the plain sources once, and links them, in the
    folder `work`.

    `isas` maps each instruction set to its flags. Raises BuildError.
    """
    flags = (*FLAGS, "-fopenmp") if _accepts_openmp(compiler, work) else FLAGS
    units: list[tuple[str, str, tuple[str, ...]]] = []
    units += [(name, "any", ("-O2", "-std=c++17", "-fPIC")) for name in PLAIN_SOURCES]
    for isa, machine in isas.items():
        units += [(name, isa, (*flags, *machine, f"-DMP_ISA_{isa}=1")) for name in SOURCES]

    def compile_unit(unit: tuple[str, str, tuple[str, ...]]) -> str:
        name, isa, options = unit
        result = str(work / f"{Path(name).stem}-{isa}.o")
        _run([compiler, *options, "-c", str(HERE / name), "-o", result])
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, units))
    library = work / "library.so"
    _run([compiler, "-shared", *flags, *objects, "-o", str(library)])
    return library


def _accepts_openmp(compiler: str, work: Path) -> bool:
    probe = work / "probe.cpp"
    probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
    try:
        _run([compiler, "-fopenmp", str(probe), "-o", str(work / "probe")])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{Path(command[0]).name} failed: {said}")


def main() -> int:
    """Builds the library and prints its path, or the reason why not. Always returns 0."""
    try:
        print(f"moonpool kernels built: {build(everything='--all' in sys.argv[1:])}")
    except (BuildError, OSError) as error:
        print(f"moonpool kernels not built, the engine will run on plain torch: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
