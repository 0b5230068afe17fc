"""The folder of one instance's SSD tier, while it is open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.storage.folder import (
    FolderLock,
    StoreError,
    check_geometry,
    explain,
    instance_folder,
    make_folder,
)
from moonpool_engine.storage.format import Geometry, make_geometry
from moonpool_engine.storage.index import SlotIndex, open_index
from moonpool_engine.storage.segments import Disk, Segments, probe_disk


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """Slots 0 ... num_slots - 1 of one folder: their segments, the index of what they hold, and the
    lock that keeps other processes out. `was_rebuilt`: whether the index was read from the
    slots."""

    path: Path
    lock: FolderLock
    segments: Segments
    index: SlotIndex
    disk: Disk
    num_slots: int
    was_rebuilt: bool

    @property
    def geometry(self) -> Geometry:
        return self.segments.geometry

    def close(self) -> None:
        self.index.close()
        self.segments.close()
        self.lock.release()


def open_store_folder(
    root: Path, instance_id: str, layout: BlockLayout, num_slots: int, segment_bytes: int
) -> StoreFolder:
    """Opens the instance's folder below `root`. Raises StoreError."""
    path = instance_folder(root, instance_id)
    make_folder(path)
    lock = FolderLock(path)
    try:
        geometry = make_geometry(layout, segment_bytes)
        check_geometry(path, geometry)
        disk = probe_disk(path, geometry.block_bytes)
        segments = Segments(path, geometry, num_slots, disk.direct)
        segments.trim()
        segments.check_space()
        index, rebuilt = open_index(path, geometry, num_slots)
    except OSError as error:
        lock.release()
        raise StoreError(explain(path, error)) from None
    except BaseException:
        lock.release()
        raise
    return StoreFolder(path, lock, segments, index, disk, num_slots, rebuilt)
