"""Makes a release (`make release`): wheels, sdists, chart, site, image, lists of parts, checksums.

Every byte follows from the commit: times are the commit's, and files are in a fixed order. So
whoever builds the same commit with the same tools gets the same bytes. `make release` builds the
wheels and the site first. This module packs the other parts, compares the versions, and writes
`SHA256SUMS`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import yaml

from changelog import FOLDER, fragments
from image import BASE, Image, ImageError, build_image, components, missing
from lock import RUNS, read_lock

ROOT = Path(__file__).resolve().parent
PROJECTS = ("pyproject.toml", "engine/pyproject.toml", "lab/pyproject.toml")
SDISTS = ("moonpool", "moonpool_engine", "moonpool_lab")
CHART = ROOT / "deploy" / "helm" / "moonpool"
SITE = ROOT / "build" / "site"


class ReleaseError(Exception):
    """The release cannot be made. The message is one line that says why."""


NO_IMAGE = "none"
"""The value of `IMAGE_BASE` for a release without an image."""


def main(dist: Path, base: str = BASE) -> None:
    """Packs and checks the files that `dist` needs in addition to wheels and sdists. Raises
    ReleaseError."""
    version = one_version(versions())
    tag = _git("tag", "--points-at", "HEAD", "v*").split()
    if tag and f"v{version}" not in tag:
        raise ReleaseError(f"the commit is tagged {', '.join(tag)}, its files say {version}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    if tag and f"## [{version}]" not in changes:
        raise ReleaseError(
            f"CHANGELOG.md has no section [{version}]: make changelog VERSION={version}"
        )
    left = [path.name for path in fragments(FOLDER)] if tag else []
    if left:
        raise ReleaseError(f"changes/ has {', '.join(left)}: make changelog VERSION={version}")
    built_s = int(_git("log", "-1", "--format=%ct"))
    for name in SDISTS:
        settle(dist / f"{name}-{version}.tar.gz", built_s)
    for path in sorted(dist.glob(f"*-{version}-*.whl")):
        settle_wheel(path)
    pack(CHART, dist / f"moonpool-chart-{version}.tgz", "moonpool", built_s)
    if SITE.is_dir():
        pack(SITE, dist / f"moonpool-site-{version}.tar.gz", "site", built_s)
    write_parts(dist / f"moonpool-{version}.cdx.json", bill_of_materials(version))
    if base != NO_IMAGE:
        pack_image(dist, version, built_s, base, needed=bool(tag))
    write_checksums(dist)
    state = "release" if tag else "candidate: the commit has no tag"
    print(f"moonpool {version} ({state}) in {dist}; SHA256SUMS lists {len(files_of(dist))} files")


def versions() -> dict[str, str]:
    """Returns the stated version by the file that states it."""
    found = {
        name: tomllib.loads((ROOT / name).read_text())["project"]["version"] for name in PROJECTS
    }
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    found |= {"Chart.yaml": chart["version"], "Chart.yaml's appVersion": chart["appVersion"]}
    for name, pattern in (
        ("setup.py", r'^VERSION = "(.+)"$'),
        ("src/moonpool/__init__.py", r'^__version__ = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
    ):
        match = re.search(pattern, (ROOT / name).read_text(), re.M)
        found[name] = match[1] if match else "none"
    return found


def one_version(found: dict[str, str]) -> str:
    """Returns the version that all files state. Raises ReleaseError if they differ."""
    if len(set(found.values())) != 1:
        raise ReleaseError(
            "the versions differ: " + ", ".join(f"{name} {text}" for name, text in found.items())
        )
    return next(iter(found.values()))


def pack(folder: Path, target: Path, top: str, built_s: int) -> None:
    """Writes a .tar.gz of `folder` as folder `top`; equal files give equal bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(f"{top}/{path.relative_to(folder).as_posix()}")
            entry.size, entry.mtime, entry.mode = path.stat().st_size, built_s, 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    target.write_bytes(gzip.compress(data.getvalue(), mtime=built_s))


def settle(sdist: Path, built_s: int) -> None:
    """Writes an sdist again, if it exists, without the parts that depend on who built it and when:
    times, owners, the order of files."""
    if not sdist.is_file():
        return
    data = io.BytesIO()
    with (
        tarfile.open(sdist) as built,
        tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in sorted(built.getmembers(), key=lambda entry: entry.name):
            content = built.extractfile(entry) if entry.isfile() else None
            kept = tarfile.TarInfo(entry.name)
            kept.type, kept.size, kept.mtime = entry.type, entry.size, built_s
            kept.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            archive.addfile(kept, content)
    sdist.write_bytes(gzip.compress(data.getvalue(), mtime=built_s))


def settle_wheel(wheel: Path) -> None:
    """Writes a wheel again without the file permissions that depend on the builder's umask."""
    data = io.BytesIO()
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(data, "w") as archive:
        for entry in built.infolist():
            content, mode = built.read(entry), entry.external_attr >> 16
            plain = 0o755 if entry.is_dir() or mode & 0o100 else 0o644
            entry.external_attr = (mode & ~0o777 | plain) << 16 | entry.external_attr & 0xFFFF
            archive.writestr(entry, content)
    wheel.write_bytes(data.getvalue())


def pack_image(dist: Path, version: str, built_s: int, base: str, *, needed: bool) -> None:
    """Builds the image and lists its parts. A candidate has no image if it cannot be built."""
    try:
        if absent := missing(base):
            raise ImageError(absent)
        image = build_image(dist, version, built_s, base)
    except ImageError as error:
        if needed:
            raise ReleaseError(f"no image: {error}; or IMAGE_BASE={NO_IMAGE}") from None
        print(f"no image in this candidate: {error}")
        return
    write_parts(dist / f"moonpool-image-{version}.cdx.json", bill_of_image(version, image))
    print(f"image {image.digest}, on {base}")


def write_parts(target: Path, parts: dict[str, Any]) -> None:
    target.write_text(json.dumps(parts, indent=1, sort_keys=True) + "\n")


def bill_of_image(version: str, image: Image) -> dict[str, Any]:
    """Returns the list of the image's packages: those of the base and those of Python."""
    name, _, value = image.digest.partition(":")
    hashes = [{"alg": name.upper().replace("SHA", "SHA-"), "content": value}]
    return _bill("container", version, components(image), hashes=hashes)


def bill_of_materials(version: str) -> dict[str, Any]:
    """Returns the list of the packages that an installation by the lock has."""
    listed = []
    for name, (requirement, options) in sorted(read_lock(RUNS).items()):
        pinned = next(iter(requirement.specifier)).version
        url = f"pkg:pypi/{name}@{pinned}"
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": pinned,
            "purl": url,
            "bom-ref": url,
            "hashes": sorted(
                (
                    {"alg": "SHA-256", "content": option.partition("sha256:")[2]}
                    for option in options
                    if "sha256:" in option
                ),
                key=lambda each: each["content"],
            ),
        }
        licence = _licence(name)
        if licence:
            component["licenses"] = [{"license": {"name": licence}}]
        listed.append(component)
    return _bill("application", version, listed)


def _bill(kind: str, version: str, components: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Returns a CycloneDX document (version 1.6) of moonpool's components; `kind` is the type of
    the whole."""
    licences = [{"license": {"id": "Apache-2.0"}}]
    whole = {"type": kind, "name": "moonpool", "version": version, "licenses": licences, **more}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": whole},
        "components": components,
    }


def _licence(name: str) -> str:
    try:
        facts = metadata(name)
    except PackageNotFoundError:
        return ""
    stated = next((facts[key] for key in ("License-Expression", "License") if key in facts), "")
    classifiers = facts.get_all("Classifier") or []
    by_classifier = [each.rpartition(" :: ")[2] for each in classifiers if "License ::" in each]
    first = stated.strip().splitlines()[:1]
    return (first[0] if first else "") or ", ".join(by_classifier)


def files_of(dist: Path) -> list[Path]:
    return sorted(path for path in dist.iterdir() if path.is_file() and path.name != "SHA256SUMS")


def write_checksums(dist: Path) -> None:
    """Writes the checksums, which `sha256sum -c SHA256SUMS` in the folder compares."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files_of(dist)
    ]
    (dist / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def _git(*words: str) -> str:
    return subprocess.run(  # noqa: S603 - fixed arguments
        ["git", *words],  # noqa: S607 - of the path, as make's own
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except ReleaseError as error:
        sys.exit(f"release: {error}")
