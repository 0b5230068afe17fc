"""Compiles the kernels into one shared library: `python -m moonpool.engine.native.build`.

Owns the compiler's command line; imports the standard library only, as `setup.py` uses it too.
Without a compiler it says so in one line: the engine then runs on plain torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moonpool.engine.native.sources import (
    FLAGS,
    HERE,
    ISA_FLAGS,
    PLAIN_SOURCES,
    SOURCES,
    STEM,
    cache_folder,
    library_name,
)

COMPILERS = ("g++", "c++", "clang++")


class BuildError(RuntimeError):
    """The library could not be built; the message is one line."""


def build(folder: Path | None = None) -> Path:
    """Compiles, unless done before, into `folder`: by default the package's or the user's cache."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"the kernels need an x86-64 CPU, this is {platform.machine()}")
    target = (folder or _writable_folder()) / library_name()
    if target.is_file():
        return target
    found = (shutil.which(name) for name in COMPILERS)
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        built = _compile(compiler, Path(work))
        os.replace(built, target)
    for old in target.parent.glob(f"{STEM}*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _writable_folder() -> Path:
    return HERE if os.access(HERE, os.W_OK) else cache_folder()


def _compile(compiler: str, work: Path) -> Path:
    flags = (*FLAGS, "-fopenmp") if _accepts_openmp(compiler, work) else FLAGS
    units: list[tuple[str, str, tuple[str, ...]]] = []
    units += [(name, "any", ("-O2", "-std=c++17", "-fPIC")) for name in PLAIN_SOURCES]
    for isa, machine in ISA_FLAGS.items():
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
    """Builds and says where; a machine that cannot build is told so, and that is no failure."""
    try:
        print(f"moonpool kernels built: {build()}")
    except (BuildError, OSError) as error:
        print(f"moonpool kernels not built, the engine will run on plain torch: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
