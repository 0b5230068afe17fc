"""Where figures come from: without command, commit and machine they are worth nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from moonpool import __version__
from moonpool.engine.machine import cpu_name


def origin() -> dict[str, str]:
    """Goes along with everything that is measured."""
    return {
        "command": "moonpool " + " ".join(sys.argv[1:]),
        "version": __version__,
        "commit": _commit(),
        "machine": f"{platform.machine()}, {cpu_name()}, Python {platform.python_version()}",
    }


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run(  # noqa: S603 - fixed arguments
        [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
