"""Builds deploy/container/Containerfile without a daemon and without a registry.

Registries may be out of reach, so the base is Debian's own Python in place of `python:3.11-slim`:
mmdebstrap makes it from Debian's packages. buildah then runs the Containerfile as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE_PACKAGES = ("python3", "python3-pip", "python-is-python3", "ca-certificates", "libstdc++6")
CHROOT = ("--isolation", "chroot", "--network", "host")


def missing() -> str:
    """Why no image can be built here; empty if one can."""
    absent = [tool for tool in ("buildah", "mmdebstrap") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)} (apt-get install {' '.join(absent)})"
    return "" if os.geteuid() == 0 else "needs root: it builds by chroot"


class Images:
    """buildah with a store of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._buildah = ("buildah", "--root", str(place / "store"))
        self._buildah += ("--runroot", str(place / "run"), "--storage-driver", "vfs")

    def buildah(self, *words: str) -> str:
        """Returns what buildah printed on stdout."""
        return run(*self.line(*words)).strip()

    def line(self, *words: str) -> list[str]:
        return [*self._buildah, *words]

    def base(self) -> str:
        """Returns the name of an image with Python and pip."""
        archive = self.place / "base.tar"
        settings = self.place / "pip.conf"
        settings.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in pip_settings()))
        run(
            *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"),
            "--include=" + ",".join(BASE_PACKAGES),
            # As in the official image, pip may install into the system's Python.
            '--customize-hook=rm -f "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED',
            f"--customize-hook=upload {settings} /etc/pip.conf",
            *("bookworm", str(archive), "http://deb.debian.org/debian"),
        )
        container = self.buildah("from", "scratch")
        self.buildah("add", "-q", container, str(archive), "/")
        self.buildah("commit", "-q", "--rm", container, "localhost/base")
        archive.unlink()
        return "localhost/base"

    def build(self, base: str, tag: str) -> None:
        """Builds the Containerfile on a base."""
        mounts = [f"--volume={folder}:{folder}:ro" for folder in _mounted()]
        # torch's index may be out of reach, as registries are; then its wheel is in find-links.
        index = ["--build-arg", "PIP_EXTRA_INDEX_URL="] if os.environ.get("PIP_FIND_LINKS") else []
        self.buildah(
            *("build", *CHROOT, *mounts, "--build-arg", f"BASE={base}", *index),
            *("-f", str(ROOT / "deploy/container/Containerfile"), "-t", tag, str(ROOT)),
        )


def pip_settings() -> list[tuple[str, str]]:
    """Settings of this machine's pip that its environment holds, by their names in pip.conf."""
    names = {"find-links": "PIP_FIND_LINKS", "cert": "PIP_CERT", "index-url": "PIP_INDEX_URL"}
    return [(key, os.environ[name]) for key, name in names.items() if name in os.environ]


def _mounted() -> list[str]:
    settings = dict(pip_settings())
    folders = [settings.get("find-links", ""), str(Path(settings.get("cert", "")).parent)]
    return [folder for folder in folders if folder.startswith("/") and Path(folder).is_dir()]


def run(*line: str) -> str:
    """Raises AssertionError with the last lines of what failed."""
    done = subprocess.run(line, capture_output=True, text=True)
    last = (done.stdout + done.stderr).splitlines()[-15:]
    assert done.returncode == 0, f"{' '.join(line)[:300]}\n" + "\n".join(last)
    return done.stdout
