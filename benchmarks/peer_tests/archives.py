"""Fetches a project's sdist and unpacks its tests."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path, PurePosixPath

import httpx

from benchmarks.peer_tests.suites import Suite

MAX_ARCHIVE_BYTES = 200 << 20
MAX_MEMBER_BYTES = 4 << 20
MAX_BYTES = 64 << 20
MAX_FILES = 4000
FETCH_S = 600.0
_DONE = ".sha256"


class ArchiveError(RuntimeError):
    """The archive is not available, or differs from the pinned one; one line says why."""


def unpacked(suite: Suite, folder: Path) -> Path:
    """Returns the folder with the suite's tests, below `folder`, and fetches the tests if they are
    missing. Raises ArchiveError."""
    place = folder / suite.name
    done = place / _DONE
    stamp = f"{suite.sha256} {' '.join(suite.members)}"
    if done.exists() and done.read_text() == stamp:
        return place
    try:
        archive = _fetched(suite, folder)
        shutil.rmtree(place, ignore_errors=True)
        unpack(archive, suite.members, place)
        done.write_text(stamp)
    except OSError as error:
        raise ArchiveError(f"{suite.title}: {error}") from None
    return place


def _fetched(suite: Suite, folder: Path) -> Path:
    """Returns the archive, whose checksum is right."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / suite.url.rpartition("/")[2]
    if not path.exists():
        part = path.with_suffix(".part")
        _download(suite.url, part)
        part.rename(path)
    check(path, suite.sha256)
    return path


def _download(url: str, path: Path) -> None:
    size = 0
    try:
        with httpx.stream("GET", url, timeout=FETCH_S, follow_redirects=True) as response:
            response.raise_for_status()
            with path.open("wb") as file:
                for data in response.iter_bytes():
                    size += len(data)
                    if size > MAX_ARCHIVE_BYTES:
                        raise ArchiveError(f"{url} has more than {MAX_ARCHIVE_BYTES} bytes")
                    file.write(data)
    except httpx.HTTPError as error:
        raise ArchiveError(f"cannot fetch {url}: {error}") from None


def check(path: Path, sha256: str) -> None:
    """Removes an archive that is not the pinned one. Raises ArchiveError."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise ArchiveError(f"{path.name} has the SHA-256 {found}, not {sha256}; it was removed")


def unpack(archive: Path, members: tuple[str, ...], place: Path) -> None:
    """Unpacks the members, which the archive has below one folder, into `place`: regular files
    only, none outside `place`. Raises ArchiveError."""
    num_bytes = num_files = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = _wanted(member, members)
                if path is None:
                    continue
                num_bytes += member.size
                num_files += 1
                if member.size > MAX_MEMBER_BYTES or num_bytes > MAX_BYTES:
                    raise ArchiveError(f"{member.name} is too large")
                if num_files > MAX_FILES:
                    raise ArchiveError(f"{archive.name} has more than {MAX_FILES} tests")
                target = place / path
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None  # regular files have contents
                target.write_bytes(source.read())
    except (tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"{archive.name} is no archive: {error}") from None
    if not num_files:
        raise ArchiveError(f"{archive.name} has none of {', '.join(members)}")


def _wanted(member: tarfile.TarInfo, members: tuple[str, ...]) -> PurePosixPath | None:
    """Returns the place of the member, or None if the member is not wanted. Raises ArchiveError."""
    inner = member.name.partition("/")[2]
    if not member.isreg() or not any(
        inner == wanted or (wanted.endswith("/") and inner.startswith(wanted)) for wanted in members
    ):
        return None
    path = PurePosixPath(inner)
    if path.is_absolute() or ".." in path.parts:
        raise ArchiveError(f"{member.name} leaves the archive's folder")
    return path
