"""Verifies or clears an SSD folder: reads every stored block and counts the damaged ones.

Needs only the folder: no model, no arena, no running instance. `verify_folder` locks the folder but
changes nothing else, because a folder that is being written would look damaged.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

from moonpool.types import BlockKey, Struct
from moonpool_engine.storage.folder import (
    INDEX_NAME,
    LOCK_NAME,
    FolderLock,
    StoreError,
    explain,
    is_store,
    read_geometry,
    segment_path,
    segments_in,
)
from moonpool_engine.storage.format import FormatError, Geometry, checksum
from moonpool_engine.storage.index import header_of, read_index, scan_slots
from moonpool_engine.storage.segments import PROBE_NAME

KEPT_BAD_SLOTS = 20
_GROUP_BYTES = 4 << 20


class Verified(Struct, frozen=True):
    """The state of one instance's folder. `bad_slots` holds the first few of the `bad_blocks`."""

    folder: str
    fingerprint: str
    index: str  # "read", or "missing" if the slots' headers were read instead
    segments: int
    block_bytes: int
    blocks: int
    bad_blocks: int
    bad_slices: int
    bad_slots: tuple[int, ...]
    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


def verify_folder(folder: Path) -> Verified:
    """Verifies one instance's folder. Raises StoreError."""
    lock = FolderLock(folder, tries_s=0.0)
    try:
        geometry = read_geometry(folder)
        if geometry is None:
            raise StoreError(f"{folder} has neither an index nor a slot that can be read")
        return _verify(folder, geometry)
    except FormatError as error:
        raise StoreError(f"{folder}: {error}") from None
    except OSError as error:
        raise StoreError(explain(folder, error)) from None
    finally:
        lock.release()


def clear_folder(folder: Path) -> int:
    """Deletes one instance's files in the folder and nothing else. Returns the bytes freed. Raises
    StoreError."""
    if not is_store(folder):
        raise StoreError(f"{folder} is not an instance's SSD folder")
    lock = FolderLock(folder, tries_s=0.0)
    try:
        paths = [*segments_in(folder).values()]
        paths += [folder / name for name in (INDEX_NAME, INDEX_NAME + ".new", PROBE_NAME)]
        freed_bytes = 0
        for path in paths:
            if path.exists():
                freed_bytes += path.stat().st_blocks * 512
                path.unlink()
        (folder / LOCK_NAME).unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    except OSError as error:
        raise StoreError(explain(folder, error)) from None
    finally:
        lock.release()
    return freed_bytes


def _verify(folder: Path, geometry: Geometry) -> Verified:
    found = read_index(folder)
    held = (scan_slots(folder, geometry) if found is None else found)[0]
    began_s = time.monotonic()
    reader = _Reader(folder, geometry)
    bad: list[int] = []
    bad_slices = num_bytes = 0
    try:
        for slot, (key, _) in sorted(held.items()):
            wrong = reader.count_wrong(slot, key)
            num_bytes += geometry.block_bytes
            if wrong:
                bad.append(slot)
                bad_slices += wrong
    finally:
        reader.close()
    return Verified(
        folder=str(folder),
        fingerprint=geometry.fingerprint.hex(),
        index="missing" if found is None else "read",
        segments=len(segments_in(folder)),
        block_bytes=geometry.block_bytes,
        blocks=len(held),
        bad_blocks=len(bad),
        bad_slices=bad_slices,
        bad_slots=tuple(bad[:KEPT_BAD_SLOTS]),
        bytes=num_bytes,
        seconds=time.monotonic() - began_s,
    )


class _Reader:
    """Reads slots in the order of the disk, several small ones with one call."""

    def __init__(self, folder: Path, geometry: Geometry) -> None:
        self._folder = folder
        self._geometry = geometry
        self._slots = max(1, _GROUP_BYTES // geometry.slot_bytes)
        self._pages = mmap.mmap(-1, self._slots * geometry.slot_bytes)
        self._segment = -1
        self._fd = -1
        self._first = self._past = 0  # range of the slots in the pages

    def count_wrong(self, slot: int, key: BlockKey) -> int:
        """Returns the number of wrong slices, counted as in a load."""
        geometry = self._geometry
        if not self._first <= slot < self._past:
            self._fill(slot)
        if slot >= self._past:
            return 1
        start = (slot - self._first) * geometry.slot_bytes
        view = memoryview(self._pages)[start : start + geometry.slot_bytes]
        header = header_of(view, geometry, slot)
        if header is None or header.key != key:
            return 1
        size, at = geometry.slice_bytes, geometry.header_bytes
        places = (at + layer * size for layer in range(geometry.num_layers))
        pairs = zip(places, header.checksums, strict=True)
        return sum(checksum(view[place : place + size]) != right for place, right in pairs)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill(self, slot: int) -> None:
        geometry = self._geometry
        segment = slot // geometry.slots_per_segment
        if segment != self._segment:
            self.close()
            self._segment, self._fd = segment, _open(segment_path(self._folder, segment))
        left = geometry.slots_per_segment - slot % geometry.slots_per_segment
        wanted = min(self._slots, left) * geometry.slot_bytes
        got = 0
        if self._fd >= 0:
            pages = memoryview(self._pages)[:wanted]
            got = os.preadv(self._fd, [pages], geometry.offset(slot))
        self._first, self._past = slot, slot + got // geometry.slot_bytes


def _open(path: Path) -> int:
    """Returns a descriptor, or -1 if the segment does not exist."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
