"""Sets up `.venv` of a checkout (`make demo`, `make setup`, `make setup-dev`).

    python3 install.py            what serves and runs the demo: requirements.lock
    python3 install.py lab        and plans, plots and measurements: requirements-lab.lock
    python3 install.py lab dev    and tests and checks: requirements-dev.lock

uv installs the packages if it is on the PATH; without it, or if it fails, pip does. At the same
time the kernels are compiled, for this machine's instruction set only, or with `dev` for all
instruction sets, which the tests need. The locks name every file by its hash. The module imports
only the standard library.
"""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
RUNS, CUDA = "requirements.lock", "requirements-cuda.lock"
MORE = {"lab": "requirements-lab.lock", "dev": "requirements-dev.lock"}
OWN = ("-e", ".", "-e", "engine", "-e", "lab")
BUILD = "engine/src/moonpool_engine/engine/native/build.py"
LAST = "opentelemetry-proto"
"""Installed last, because xds-protos brings older copies of its files."""
MIN_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""torch's own index of builds for CPUs, whose file requirements.lock names by its hash."""
_INDEXES = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
}
"""pip's settings of the places of packages, and uv's flags for the same places."""

Command = Sequence[str | Path]


class InstallError(RuntimeError):
    """Says in one line what could not be installed."""


def main(parts: Sequence[str]) -> int:
    """Installs and returns the status of the process; one line on stderr says what failed."""
    os.chdir(ROOT)
    unknown = [part for part in parts if part not in MORE]
    if sys.version_info < MIN_PYTHON or unknown:
        wrong = f"unknown part {unknown[0]!r}" if unknown else f"this is {sys.version.split()[0]}"
        sys.stderr.write(f"moonpool needs Python 3.11 or newer, and parts of lab, dev: {wrong}\n")
        return 1
    try:
        install(parts)
    except (InstallError, OSError) as error:
        sys.stderr.write(f"moonpool is not installed: {error}\n")
        return 1
    return 0


def install(parts: Sequence[str]) -> None:
    """Makes the environment, and fills it. Raises InstallError."""
    began_s = time.monotonic()
    whole = ("--all",) if "dev" in parts else ()
    build = (sys.executable, BUILD, *whole)
    kernels = subprocess.Popen(build, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    try:
        uv = shutil.which("uv")
        with _step("environment"):
            uv = _make_environment(uv)
        locks = [RUNS, *(MORE[part] for part in parts)]
        with _step(f"packages, by {'uv' if uv else 'pip'} (about a minute where not cached)"):
            if uv is None or not _packages_by_uv(uv, locks):
                uv = None
                _packages_by_pip(locks)
        if "dev" in parts:
            _put_last(uv, LAST)
        with _step("kernels (compiled meanwhile)"):
            said = kernels.communicate()[0]
        print(f"  {said.strip()}")
    finally:
        kernels.kill()
        kernels.wait()
    with _step("moonpool itself"):
        own = ("--no-deps", "--no-build-isolation", *OWN)
        if uv is None or not _uv(uv, ("-q", *own)):
            _run((*_pip(), "install", "-q", "--no-compile", *own))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_s, cpu_s = time.monotonic() - began_s, used.ru_utime + used.ru_stime
    print(f"installed in {wall_s:.0f} s, with {cpu_s:.0f} s of CPU time", flush=True)


@contextmanager
def _step(name: str) -> Iterator[None]:
    """Prints the name of a step, and afterwards how long the step took."""
    print(f"{name} ...", flush=True)
    began_s = time.monotonic()
    yield
    print(f"  {time.monotonic() - began_s:.1f} s", flush=True)


def _make_environment(uv: str | None) -> str | None:
    """Makes the environment unless it exists. Returns `uv`, or None if uv could not make it."""
    if PYTHON.exists():
        return uv
    if uv is not None:
        # The environment gets pip, which tests and people use.
        line = (uv, "venv", "-q", "--seed", "--clear", "--python", sys.executable, VENV)
        if _succeeds(line):
            return uv
    _run((sys.executable, "-m", "venv", "--clear", VENV))
    return None


def _packages_by_uv(uv: str, locks: Sequence[str]) -> bool:
    """Installs the packages of `locks` by uv, from the places that pip would use. Returns whether
    that succeeded."""
    # Any index may give a file, because its hash is known.
    rules = (*_places_of_pip(), "--index-strategy", "unsafe-best-match", "--require-hashes")
    pin, rest = _lock_of_torch(), VENV / "rest.lock"
    rest.write_text((ROOT / RUNS).read_text().replace(pin, ""))
    named = VENV / "torch.lock"
    # uv looks up hashes by the complete version, including the local part (such as +cpu).
    named.write_text(pin.replace(pin.split()[0], f"{pin.split()[0]}+cpu", 1))
    others = tuple(word for lock in (rest, *locks[1:]) for word in ("-r", lock))
    if _uv(uv, (*rules, "-r", named, *others)):
        return True
    if not _has_gpu() and _is_for_cpu_torch():
        print("  once more, with torch from its index of builds for CPUs", flush=True)
        if _uv(uv, (*rules, "--torch-backend", "cpu", "-r", named, *others)):
            return True
    return _uv(uv, (*rules, "--no-deps", "-r", CUDA)) and _uv(uv, (*rules, *others))


def _packages_by_pip(locks: Sequence[str]) -> None:
    """Installs the packages of `locks` by pip. Raises InstallError."""
    install = (*_pip(), "install", "--no-compile", "--require-hashes")
    if not _finds_cpu_torch() and not _takes_cpu_torch(install):
        _run((*install, "--no-deps", "-r", CUDA))
    _run((*install, *(word for lock in locks for word in ("-r", lock))))


def _put_last(uv: str | None, package: str) -> None:
    """Installs a package of the development lock once more, over files that other packages have
    written."""
    pins = (ROOT / MORE["dev"]).read_text()
    found = re.search(rf"^{package}==(?:.*\\\n)*.*\n", pins, re.MULTILINE)
    if found is None:
        raise InstallError(f"{MORE['dev']} has no {package}")
    pin = VENV / "last.lock"
    pin.write_text(found.group())
    words = ("-q", "--no-deps", "--require-hashes", "-r", pin)
    if uv is None or not _uv(uv, ("--reinstall", *_places_of_pip(), *words)):
        _run((*_pip(), "install", "--no-compile", "--force-reinstall", *words))


def _takes_cpu_torch(install: Command) -> bool:
    """Installs torch's build for CPUs from torch's own index if there is no GPU. Returns whether
    that succeeded."""
    if _has_gpu() or not _is_for_cpu_torch():
        return False
    pin = VENV / "torch.lock"
    pin.write_text(_lock_of_torch())
    quick = ("--no-deps", "--retries", "0", "--timeout", "10", "--index-url", CPU_INDEX)
    return _succeeds((*install, *quick, "-r", pin))


def _finds_cpu_torch() -> bool:
    """Whether pip would install the torch that requirements.lock names."""
    words = ("-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-")
    done = subprocess.run(  # noqa: S603 - our own
        (*_pip(), "install", *words, _lock_of_torch().split()[0]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return False
    found = json.loads(done.stdout)["install"][0]["download_info"]["archive_info"]["hashes"]
    return found.get("sha256", "none") in _lock_of_torch()


def _lock_of_torch() -> str:
    """Returns the lines of requirements.lock that pin torch."""
    found = re.search(r"^torch==(?:.*\\\n)*.*\n", (ROOT / RUNS).read_text(), re.MULTILINE)
    if found is None:
        raise InstallError(f"{RUNS} has no torch")
    return found.group()


def _is_for_cpu_torch() -> bool:
    """Whether the hash in requirements.lock is that of a build for this Python and machine."""
    return sys.version_info[:2] == (3, 11) and os.uname().machine == "x86_64"


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _places_of_pip() -> list[str]:
    """Returns pip's settings of the places of packages as flags for uv, which does not read these
    settings."""
    line = (*_pip(sys.executable), "config", "list")
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    found: dict[tuple[str, str], None] = {}
    for name, value in re.findall(r"^[^=\s]*\.([\w-]+)=(.*)$", done.stdout, re.MULTILINE):
        for place in str(ast.literal_eval(value)).split() if name in _INDEXES else ():
            found[_INDEXES[name], place] = None
    return [word for pair in found for word in pair]


def _pip(python: str | Path = PYTHON) -> tuple[str | Path, ...]:
    return (python, "-m", "pip", "--disable-pip-version-check")


def _uv(uv: str, arguments: Command) -> bool:
    # If its cache is on another file system, uv would print a warning for each package that it
    # copies.
    link = {} if "UV_LINK_MODE" in os.environ else {"UV_LINK_MODE": _link_mode()}
    few = {"UV_HTTP_RETRIES": os.environ.get("UV_HTTP_RETRIES", "1")}
    return _succeeds((uv, "pip", "install", "--python", PYTHON, *arguments), link | few)


def _link_mode() -> str:
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    same = cache.exists() and cache.stat().st_dev == VENV.stat().st_dev
    return "hardlink" if same else "copy"


def _succeeds(line: Command, more: dict[str, str] | None = None) -> bool:
    environment = {**os.environ, **(more or {})}
    return subprocess.run(line, env=environment, check=False).returncode == 0  # noqa: S603 - our own


def _run(line: Command) -> None:
    if not _succeeds(line):
        shown = " ".join(map(str, line))
        raise InstallError(f"this failed, and its own words are above: {shown}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
