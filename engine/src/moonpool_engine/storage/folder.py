"""The folder of one instance's SSD tier: its file names, its lock and its permissions.

KVCache contains what users wrote, so only the owner can access the folder (0700, files 0600). Only
one process uses a folder at a time: the kernel releases the lock when that process ends, however it
ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from urllib.parse import quote

from moonpool_engine.storage.format import FormatError, Geometry, decode_header, decode_index_head

LOCK_NAME = "lock"
INDEX_NAME = "index"
_SEGMENT = re.compile(r"segment-(\d{6})")
_TRIES_S = 2.0
"""How long a process that was just killed may keep the lock."""


class StoreError(Exception):
    """The SSD tier cannot be used, or not any more; one line says why and what to do."""


def default_folder() -> Path:
    """Returns the folder for the blocks of all instances unless one is configured."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moonpool" / "ssd"


def instance_folder(root: Path, instance_id: str) -> Path:
    """Returns the instance's folder below `root`."""
    return root / (quote(instance_id, safe="") or "_").replace(".", "%2E")


def segment_path(folder: Path, number: int) -> Path:
    """Returns the path of a segment file."""
    return folder / f"segment-{number:06d}"


def segments_in(folder: Path) -> dict[int, Path]:
    """Returns the existing segment files by number."""
    found = {}
    for path in folder.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match:
            found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def is_store(folder: Path) -> bool:
    """Whether the folder contains an instance's blocks."""
    return (folder / INDEX_NAME).is_file() or bool(folder.is_dir() and segments_in(folder))


def stores_below(folder: Path) -> list[Path]:
    """Returns the folder itself if it contains an instance's blocks, or else the subfolders that
    do. Raises StoreError."""
    try:
        if is_store(folder):
            return [folder]
        return [child for child in sorted(folder.iterdir()) if child.is_dir() and is_store(child)]
    except OSError as error:
        raise StoreError(explain(folder, error)) from None


def make_folder(folder: Path, setting: str = "pool.ssd_folder") -> None:
    """Creates the folder. Raises StoreError if that fails, or if other users could access it.
    `setting`: the setting that names the folder, for the error text."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StoreError(explain(folder, error, setting)) from None
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{folder} is not a folder; name another as {setting}")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreError(
            f"{folder} must belong to the user of this process and be closed to others:"
            f" chown it and chmod 700 it, or name another as {setting}"
        )


class FolderLock:
    """The exclusive right to use the folder, until `release` or the end of the process. Raises
    StoreError if another process has it."""

    def __init__(self, folder: Path, tries_s: float = _TRIES_S) -> None:
        path = folder / LOCK_NAME
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(explain(folder, error)) from None
        end_s = time.monotonic() + tries_s
        while not self._try():
            if time.monotonic() >= end_s:
                holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "another"
                os.close(self._fd)
                raise StoreError(
                    f"{folder} is in use by process {holder}: two instances cannot share it"
                )
            time.sleep(0.05)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk; the pid in the file only informs people
            pass

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            os.close(self._fd)
            raise StoreError(f"the SSD folder cannot be locked: {error}") from None
        return True


def read_geometry(folder: Path) -> Geometry | None:
    """Returns the geometry from the index, or from the first readable slot, or None. Raises
    OSError, OtherVersionError."""
    try:
        return decode_index_head(_read_head(folder / INDEX_NAME))
    except FileNotFoundError:
        pass
    except FormatError as error:
        _raise_if_other_version(error)
    for path in segments_in(folder).values():
        try:
            return decode_header(_read_head(path)).geometry
        except FormatError as error:
            _raise_if_other_version(error)
    return None


def check_geometry(folder: Path, geometry: Geometry) -> None:
    """Raises StoreError if the folder holds blocks of another geometry or version."""
    try:
        found = read_geometry(folder)
    except FormatError as error:
        text = f"{folder} cannot be used: {error}"
    else:
        if found is None or found == geometry:
            return
        text = f"{folder} holds blocks of another model, dtype or layout"
    raise StoreError(
        f"{text}; name another folder, or clear it with `moonpool pool clear {folder}`"
    )


def explain(folder: Path, error: OSError, setting: str = "pool.ssd_folder") -> str:
    """Returns one line: what failed and what to do."""
    what = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            way_out = "free some space, or lower pool.ssd_tokens_per_instance"
            return f"the disk of {folder} is full: {way_out}"
        case errno.EROFS:
            return f"{folder} is read-only: mount its disk to be written, or name another folder"
        case errno.EACCES | errno.EPERM:
            return f"{folder} cannot be used ({what}): give this user the right to write there"
        case errno.ENOENT | errno.ESTALE:
            return f"{folder} is gone ({what}): was it deleted or unmounted?"
    return f"{folder} cannot be used ({what}); name another as {setting}"


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 16)


def _raise_if_other_version(error: FormatError) -> None:
    if type(error) is not FormatError:
        raise error
