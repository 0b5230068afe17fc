"""Builds the site like `make docs`, in a folder of a test."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from website.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


def write_sources(folder: Path) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Writes the sources into `folder`/source; the returned function builds `folder`/site from
    them."""
    mkdocs = _mkdocs(folder / "venv")
    written = CliRunner().invoke(main, [str(folder / "source")])
    assert written.exit_code == 0, written.output
    config = folder / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: source\nsite_dir: site\n")
    line = [str(mkdocs), "build", "--strict", "-f", str(config)]
    return partial(subprocess.run, line, capture_output=True, text=True, timeout=300)


def _mkdocs(folder: Path) -> Path:
    """Returns the locked MkDocs: MkDocs of `make docs`, or an installation in `folder`."""
    lock = ROOT / "requirements-docs.lock"
    installed = ROOT / ".venv-docs" / ".installed"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return installed.parent / "bin" / "mkdocs"
    venv.create(folder, with_pip=True)
    line = [str(folder / "bin" / "pip"), "install", "-q", "--require-hashes", "-r"]
    line.append(str(lock))
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"the packages of the site cannot be installed here: {done.stderr[-300:]}")
    return folder / "bin" / "mkdocs"
