"""Writes the locks (`make lock`): every package that an installation needs, with its hashes.

uv resolves the requirements of pyproject.toml, for all Pythons of Linux, and keeps the versions
that the locks have. `--upgrade` takes the newest versions instead. pip installs everything that a
file lists, so there are five files: the packages of moonpool and its engine, with torch for CPUs,
which is all that the demo needs; torch of PyPI with CUDA, to be installed first by users who want
it; the further packages of the lab; the further packages of tests and checks; and the packages of
the documentation, for an environment of its own. One list cannot have both builds of torch: given
the hashes of both, pip prefers the file whose index states a hash, which is never a file in a
folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent
RUNS, CUDA, LAB, DEV, DOCS = (
    ROOT / f"requirements{name}.lock" for name in ("", "-cuda", "-lab", "-dev", "-docs")
)
HEADS = {
    RUNS: "What moonpool, its engine and the demo run on, with torch for CPUs",
    CUDA: "torch of PyPI, with CUDA; installed with --no-deps before requirements.lock",
    LAB: "What plans, plots and measurements need beside requirements.lock",
    DEV: "What its tests and checks need beside requirements.lock and requirements-lab.lock",
    DOCS: "What builds the documentation site (`make docs`), in an environment of its own",
}

TORCH = "torch==2.13.0"
"""The release whose bits the tests compare."""
CPU_TORCH = (
    # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
    "--hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
)
"""The hashes of its builds for CPUs, which PyPI does not have. `pip hash FILE` prints such a
line."""
_OF_CUDA = re.compile(r"(?:nvidia|cuda)-|(?:torch|triton)$")

SERVES = ("pyproject.toml", "engine/pyproject.toml")
PROJECTS = (*SERVES, "lab/pyproject.toml")
OWN = ("moonpool", "moonpool-engine", "moonpool-lab")

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
DOCS_PYTHON = "3.11.5"
"""The oldest Python on which the documentation's packages can be installed."""
MACHINES = ("x86_64", "aarch64")

Lock = dict[str, tuple[Requirement, tuple[str, ...]]]
"""Pinned requirements by name, with the hashes of their files as pip's options."""


def read_lock(path: Path) -> Lock:
    """Returns the requirements of a lock, or none if the file does not exist."""
    return parse_lock(path.read_text()) if path.exists() else {}


def parse_lock(text: str) -> Lock:
    """Returns the requirements of a lock's text."""
    found: Lock = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split(" --hash=")
        if words[0].strip():
            requirement = Requirement(words[0].strip())
            hashes = tuple(f"--hash={word.strip()}" for word in words[1:])
            found[canonicalize_name(requirement.name)] = (requirement, hashes)
    return found


def main() -> None:
    """Writes all locks. If no versions fit, ends with status 1 and uv's message."""
    pins: Lock = {}
    if "--upgrade" not in sys.argv[1:]:
        for path in (RUNS, CUDA, LAB, DEV):
            pins |= read_lock(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    builds = project["build-system"]["requires"]  # the packages are built in the environment itself
    lab = _resolve(pins, "--extra", "plan", also=builds)
    runs = _resolve(pins | lab, sources=SERVES, also=builds)
    cuda = {name: runs.pop(name) for name in list(runs) if _OF_CUDA.match(name)}
    runs["torch"] = (Requirement(TORCH), CPU_TORCH)
    dev = _resolve(pins | lab, "--extra", "plan", "--group", "dev", also=builds)
    _write(RUNS, runs)
    _write(CUDA, cuda)
    _write(LAB, {name: each for name, each in lab.items() if name not in runs | cuda})
    _write(DEV, {name: each for name, each in dev.items() if name not in runs | cuda | lab})
    docs = {} if "--upgrade" in sys.argv[1:] else read_lock(DOCS)
    _write(DOCS, _resolve(docs, only="docs"))


def _resolve(
    pins: Lock,
    *options: str,
    sources: Iterable[str] = PROJECTS,
    also: Iterable[str] = (),
    only: str = "",
) -> Lock:
    """Returns what uv finds for `sources` with these options, or for the project's group `only`
    alone."""
    python = DOCS_PYTHON if only == "docs" else PYTHONS[0]
    with tempfile.TemporaryDirectory() as folder:
        limits, wanted = Path(folder) / "limits", Path(folder) / "wanted"
        kept = [f"{each.name}{each.specifier}" for each, _ in pins.values()]
        limits.write_text("\n".join([*kept, TORCH]))
        wanted.write_text("\n".join(also))
        named = ["--group", only] if only else [*sources, str(wanted)]
        done = subprocess.run(  # noqa: S603 - fixed arguments
            [
                *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", python),
                *("--generate-hashes", "--no-header", "--no-annotate", "--constraints"),
                *(str(limits), *options, *named),
                *(word for name in OWN for word in ("--no-emit-package", name)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.returncode)
    return _for_linux(parse_lock(done.stdout))


def _for_linux(lock: Lock) -> Lock:
    """Leaves out requirements of other systems, and conditions that are always true on Linux."""
    places: list[dict[str, str | frozenset[str]]] = [
        {
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for python, machine in product(PYTHONS, MACHINES)
    ]
    found: Lock = {}
    for name, (requirement, hashes) in lock.items():
        marker = requirement.marker
        fits = [marker is None or marker.evaluate(place) for place in places]
        if all(fits):
            requirement.marker = None
        if any(fits):
            found[name] = (requirement, hashes)
    return found


def _write(path: Path, lock: Lock) -> None:
    lines = [f"# {HEADS[path]}: `make lock` writes it (see docs/dependencies.md)."]
    for name, (requirement, hashes) in sorted(lock.items()):
        marker = f" ; {requirement.marker}" if requirement.marker else ""
        pin = f"{name}{requirement.specifier}{marker}"
        lines.append(" \\\n    ".join((pin, *hashes)))
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(lock)} packages")


if __name__ == "__main__":
    main()
