"""Builds the container image of a release (`make release`), without a daemon and with the same
bytes each time.

buildah runs deploy/container/Containerfile in a chroot, with the wheels that are built already. The
base is an image of a registry, or with `IMAGE_BASE=debian`, mmdebstrap makes it from Debian's
packages. All times are the commit's, and byte code has no times. So the same commit on the same
base gives an image with the same digest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
BASE = "docker.io/library/python:3.11-slim"
DEBIAN = "debian"
"""The base that mmdebstrap makes, for machines that cannot reach a registry."""
DEBIAN_PACKAGES = ("python3", "python3-pip", "python-is-python3", "ca-certificates", "libstdc++6")
CHROOT = ("--isolation", "chroot", "--network", "host")
TAG = "localhost/moonpool"


class ImageError(Exception):
    """The image cannot be built. The message says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its digest, and the names and versions of its packages."""

    digest: str
    debian: dict[str, str]
    python: dict[str, str]


def missing(base: str = BASE) -> str:
    """Returns the command to run before an image can be built, or "" if none is needed."""
    tools = ("buildah", "mmdebstrap") if base == DEBIAN else ("buildah",)
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"apt-get install {' '.join(absent)}"
    return "" if os.geteuid() == 0 else "buildah unshare make release (its files need owners)"


def build_image(dist: Path, version: str, built_s: int, base: str) -> Image:
    """Builds the image from the wheels in `dist`, and writes it there as an OCI archive. Raises
    ImageError."""
    (ROOT / "build").mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="image-", dir=ROOT / "build"))
    images = Images(place, built_s)
    try:
        images.build(images.debian() if base == DEBIAN else base, dist, version)
        layout = place / "layout"
        images.buildah("push", "-q", TAG, f"oci:{layout}:{version}")
        digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
        pack(layout, dist / f"moonpool-image-{version}.tar", built_s)
        parts = Image(digest, *parts_of(images.root()))
    finally:  # several GB
        shutil.rmtree(place, ignore_errors=True)
    return parts


class Images:
    """Runs buildah with a store of its own. All files of its images get the same time."""

    def __init__(self, place: Path, built_s: int) -> None:
        self.place = place
        self._built_s = built_s
        self._buildah = ("buildah", "--root", str(place / "store"))
        self._buildah += ("--runroot", str(place / "run"), "--storage-driver", "vfs")

    def buildah(self, *words: str) -> str:
        """Returns what buildah printed on stdout."""
        return self._run(*self.line(*words)).strip()

    def line(self, *words: str) -> list[str]:
        return [*self._buildah, *words]

    def debian(self) -> str:
        """Returns the name of an image of Debian with Python and pip."""
        archive = self.place / "base.tar"
        self._run(
            *("mmdebstrap", "--quiet", "--variant=minbase"),
            "--include=" + ",".join(DEBIAN_PACKAGES),
            # As in the official image, pip may install into the system's Python.
            '--customize-hook=rm -f "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED',
            *("bookworm", str(archive), "http://deb.debian.org/debian"),
        )
        container = self.buildah("from", "scratch")
        self.buildah("add", "-q", container, str(archive), "/")
        time = ("--timestamp", str(self._built_s))
        self.buildah("commit", "-q", "--rm", *time, container, "localhost/base")
        archive.unlink()
        return "localhost/base"

    def build(self, base: str, wheels: Path | None, version: str) -> None:
        """Builds the Containerfile on a base, as TAG, with `wheels`, or without them from the
        sources."""
        given = self.place / "given"
        given.mkdir()
        for wheel in wheels.glob(f"moonpool*-{version}-*.whl") if wheels else ():
            shutil.copy(wheel, given)
        mounts = [f"--volume={given}:/media:ro", *self._settings_of_pip(given)]
        # If torch's index cannot be reached, its wheel is in PIP_FIND_LINKS.
        index = ["--build-arg", "PIP_EXTRA_INDEX_URL="] if os.environ.get("PIP_FIND_LINKS") else []
        label = "org.opencontainers.image"
        self.buildah(
            *("build", "-q", *CHROOT, *mounts, "--build-arg", f"BASE={base}", *index),
            *("--build-arg", f"SOURCE_DATE_EPOCH={self._built_s}"),
            *("--timestamp", str(self._built_s), "--identity-label=false"),
            *("--label", f"{label}.version={version}", "--label", f"{label}.licenses=Apache-2.0"),
            *("-f", str(CONTAINERFILE), "-t", TAG, str(ROOT)),
        )

    def root(self) -> Path:
        """Returns the folder with the files of the built image."""
        return Path(self.buildah("mount", self.buildah("from", TAG)))

    def _settings_of_pip(self, given: Path) -> list[str]:
        """Writes pip's settings of this machine's environment into a file for the build. Returns
        the mounts."""
        settings, mounts = {}, []
        links, cert = os.environ.get("PIP_FIND_LINKS", ""), os.environ.get("PIP_CERT", "")
        if Path(links).is_dir() and links:
            settings["find-links"] = "/srv"
            mounts = [f"--volume={links}:/srv:ro"]
        if cert:
            shutil.copy(cert, given / "ca.crt")
            settings["cert"] = "/media/ca.crt"
        if "PIP_INDEX_URL" in os.environ:
            settings["index-url"] = os.environ["PIP_INDEX_URL"]
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (given / "pip.conf").write_text("[global]\n" + "".join(lines))
        return mounts

    def _run(self, *line: str) -> str:
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(self._built_s)}
        done = subprocess.run(line, capture_output=True, text=True, env=environment)  # noqa: S603
        if done.returncode != 0:
            last = (done.stdout + done.stderr).splitlines()[-15:]
            raise ImageError(f"{' '.join(line)[:300]} failed:\n" + "\n".join(last))
        return done.stdout


def parts_of(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the versions of Debian's and of Python's packages in the files of an image, by
    name."""
    debian: dict[str, str] = {}
    status = root / "var/lib/dpkg/status"
    for entry in status.read_text().split("\n\n") if status.is_file() else ():
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
        if fields.get("Status", "").endswith(" installed"):
            debian[fields["Package"]] = fields["Version"]
    folders = [str(path) for path in root.glob("usr/**/*-packages") if path.is_dir()]
    found = {each.name: each.version for each in distributions(path=folders)}
    return dict(sorted(debian.items())), dict(sorted(found.items()))


def components(image: Image) -> list[dict[str, Any]]:
    """Returns the image's packages in CycloneDX's form."""
    kinds = (("pkg:deb/debian/", image.debian), ("pkg:pypi/", image.python))
    return [
        {"type": "library", "name": name, "version": version, "purl": f"{kind}{name}@{version}"}
        for kind, versions in kinds
        for name, version in versions.items()
    ]


def pack(layout: Path, target: Path, built_s: int) -> None:
    """Writes the folder of an OCI image as an archive; equal files give equal bytes."""
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in layout.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(layout).as_posix())
            entry.size, entry.mtime, entry.mode = path.stat().st_size, built_s, 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
