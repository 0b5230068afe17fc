"""Reads the clients of clients.toml, and makes a separate environment for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkout import ROOT

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
INSTALL_S = 1200.0
"""Longest time of one installation."""
_PINS = "pins.json"


class InstallError(RuntimeError):
    """A client could not be installed; the text is the installer's last line."""


class Client(NamedTuple):
    """One client: its name on the page, its pinned packages, the script that uses it, and whether
    its packages need torch."""

    name: str
    packages: tuple[str, ...]
    script: str
    torch: bool = False

    @property
    def version(self) -> str:
        """Returns the version of the first package, or "" for a program of the system."""
        first = self.packages[0] if self.packages else ""
        return first.rpartition("@" if self.is_node else "==")[2]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


def read_clients() -> list[Client]:
    table = tomllib.loads((HERE / "clients.toml").read_text())
    return [Client(**c | {"packages": tuple(c["packages"])}) for c in table["client"]]


def command_line(client: Client, folder: Path) -> list[str]:
    """Installs a client below `folder` unless its pinned packages are there, and returns the
    command that runs its script.

    Raises InstallError.
    """
    if not client.packages:
        return [sys.executable, str(SCRIPTS / client.script)]
    place = folder / client.script.partition(".")[0]
    if not client.is_node:
        python = python_environment(client.packages, place, client.torch)
        return [str(python), str(SCRIPTS / client.script)]
    if not _is_there(client.packages, place):
        _install_node(client, place)
        _note(client.packages, place)
    for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(script, place)
    return ["node", str(place / client.script)]


def python_environment(packages: tuple[str, ...], place: Path, torch: bool = False) -> Path:
    """Returns the Python of an environment in `place`, with the packages; installs them unless
    they are there.

    Raises InstallError.
    """
    python = place / "venv/bin/python"
    if not _is_there(packages, place):
        limits = place / "limits.txt"
        limits.write_text(_locked_torch() if torch else "torch<0\n")
        _run([sys.executable, "-m", "venv", str(place / "venv")], place)
        pip = [str(place / "venv/bin/pip"), "install", "-q", "--no-input", "-c", str(limits)]
        _run([*pip, *packages], place)
        _note(packages, place)
    return python


def _is_there(packages: tuple[str, ...], place: Path) -> bool:
    """Whether the packages are installed in `place`; if not, `place` is empty afterwards."""
    pins = place / _PINS
    if pins.exists() and json.loads(pins.read_text()) == list(packages):
        return True
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return False


def _note(packages: tuple[str, ...], place: Path) -> None:
    (place / _PINS).write_text(json.dumps(packages))


def _locked_torch() -> str:
    """Returns the torch of moonpool's own environment, because another one would take several GB
    more."""
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    return "".join(f"{line.split()[0]}\n" for line in lock if line.startswith("torch=="))


def _install_node(client: Client, place: Path) -> None:
    if shutil.which("npm") is None:
        raise InstallError("npm is not installed")
    (place / "package.json").write_text('{"private": true}\n')
    _run(["npm", "install", "--no-fund", "--no-audit", *client.packages], place)


def _run(line: list[str], place: Path) -> None:
    try:
        done = subprocess.run(
            line, cwd=place, capture_output=True, text=True, timeout=INSTALL_S, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise InstallError(_reason(done.stderr) or f"status {done.returncode}")


def _reason(said: str) -> str:
    """The line of an installer that says why: a conflict, or its first error."""
    lines = [line.strip() for line in said.splitlines()]
    for word in (" depends on ", "ERROR", "npm error"):
        for line in lines:
            if word in line:
                return line.removeprefix("ERROR:").strip()[:200]
    return lines[-1][:200] if lines else ""


def environment() -> dict[str, str]:
    """Returns the environment variables of clients, without those of this process's Python."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
