"""The index of which block is in which slot, in memory and as a log on disk (see `format`).

Methods that change it take microseconds and do not access the disk; `flush` writes the changes.
Sequence numbers are assigned here, so changes are ordered by the calls, not by the records in the
file. This module neither reads nor writes blocks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from moonpool.types import BlockKey
from moonpool_engine.storage.folder import INDEX_NAME, segments_in
from moonpool_engine.storage.format import (
    HELD,
    INDEX_HEAD_BYTES,
    NO_KEY,
    RECORD_BYTES,
    USED,
    VOID,
    FormatError,
    Geometry,
    OtherVersionError,
    Record,
    SlotHeader,
    decode_header,
    decode_index_head,
    decode_records,
    encode_index_head,
    encode_records,
)

_SPARE_RECORDS = 4096
"""The log is rewritten when it has more than twice the needed records plus this number."""


class SlotIndex:
    """The index of one SSD folder. `open_index` opens or creates it. Thread-safe."""

    def __init__(
        self, folder: Path, geometry: Geometry, held: dict[int, tuple[BlockKey, int]], next_: int
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._lock = threading.Lock()  # guards the fields below
        self._held = held
        self._latest = {slot: sequence for slot, (_, sequence) in held.items()}
        self._next = next_
        self._pending: list[Record] = []
        self._file_lock = threading.Lock()  # guards the fields below; taken before _lock
        self._fd = -1
        self._num_records = 0
        self._stale = False

    def held(self) -> list[tuple[int, BlockKey]]:
        """Returns (slot, key) of the stored blocks, least recently used first."""
        with self._lock:
            order = sorted((sequence, slot) for slot, (_, sequence) in self._held.items())
            return [(slot, self._held[slot][0]) for _, slot in order]

    def begin(self, slot: int) -> int:
        """Voids a slot that is about to be written. Returns the sequence of the write."""
        with self._lock:
            if slot in self._held:
                self._note(VOID, slot, NO_KEY)
            self._next += 1
            return self._next - 1

    def hold(self, slot: int, key: BlockKey, sequence: int) -> None:
        """Records a written slot; `sequence` is from `begin`. Ignored if it was voided since."""
        with self._lock:
            if self._latest.get(slot, -1) < sequence:
                self._note(HELD, slot, key, sequence)

    def use(self, slots: Iterable[int]) -> None:
        """Records that the slots were used."""
        with self._lock:
            for slot in slots:
                if slot in self._held:
                    self._note(USED, slot, self._held[slot][0])

    def void(self, slots: Iterable[int]) -> int:
        """Records that the slots are empty. Returns how many of them held a block."""
        num_held = 0
        with self._lock:
            for slot in slots:
                num_held += slot in self._held
                self._note(VOID, slot, NO_KEY)
        return num_held

    def flush(self) -> None:
        """Writes the changes. Raises OSError, after which a later call writes the records."""
        with self._file_lock:
            with self._lock:
                records, self._pending = self._pending, []
                needed = len(self._held)
            total = self._num_records + len(records)
            if self._fd < 0 or self._stale or total > 2 * needed + _SPARE_RECORDS:
                self._rewrite()
            elif records:
                data = encode_records(records)
                self._stale = True  # stale until all of it is written
                _write_all(self._fd, data, INDEX_HEAD_BYTES + self._num_records * RECORD_BYTES)
                self._stale = False
                self._num_records = total

    def vanished(self) -> bool:
        """Whether the index file was deleted, probably with the folder."""
        with self._file_lock:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        with self._file_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _note(self, kind: int, slot: int, key: BlockKey, sequence: int | None = None) -> None:
        if sequence is None:
            sequence = self._next
            self._next += 1
        self._latest[slot] = sequence
        if kind == VOID:
            self._held.pop(slot, None)
        else:
            self._held[slot] = (key, sequence)
        self._pending.append(Record(kind, slot, sequence, key))

    def _rewrite(self) -> None:
        """Writes the whole index to a new file, which replaces the old file."""
        with self._lock:
            self._pending.clear()
            entries = sorted((s, slot, key) for slot, (key, s) in self._held.items())
        records = [Record(HELD, slot, sequence, key) for sequence, slot, key in entries]
        path = self._folder / INDEX_NAME
        partial = path.with_suffix(".new")
        self._stale = True
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, encode_index_head(self._geometry) + encode_records(records), 0)
            partial.replace(path)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._num_records, self._stale = fd, len(records), False


Held = dict[int, tuple[BlockKey, int]]
"""Slot -> (key of its block, sequence of its last use)."""


def open_index(folder: Path, geometry: Geometry, num_slots: int) -> tuple[SlotIndex, bool]:
    """Reads the index of a folder of this geometry, or rebuilds it from the slots' headers. Returns
    it, and whether it was rebuilt. Raises OSError."""
    found = read_index(folder)
    rebuilt = found is None
    held, last = scan_slots(folder, geometry) if found is None else found
    held = _present(held, folder, geometry, num_slots)
    index = SlotIndex(folder, geometry, held, last + 1)
    index.flush()
    return index, rebuilt


def read_index(folder: Path) -> tuple[Held, int] | None:
    """Returns the content of the index and its highest sequence, or None if it is missing or its
    head is damaged. Raises OSError, OtherVersionError."""
    try:
        data = (folder / INDEX_NAME).read_bytes()
        decode_index_head(data)
    except FileNotFoundError:
        return None
    except OtherVersionError:
        raise
    except FormatError:
        return None
    latest: dict[int, Record] = {}
    last = -1
    for record in decode_records(data[INDEX_HEAD_BYTES:]):
        if record is None:
            continue
        last = max(last, record.sequence)
        if record.slot not in latest or latest[record.slot].sequence < record.sequence:
            latest[record.slot] = record
    held = {s: (r.key, r.sequence) for s, r in latest.items() if r.kind in (HELD, USED)}
    return held, last


def scan_slots(folder: Path, geometry: Geometry) -> tuple[Held, int]:
    """Returns what `read_index` returns, from the headers of the slots. Raises OSError."""
    held: Held = {}
    for number, path in segments_in(folder).items():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for place in range(os.fstat(fd).st_size // geometry.slot_bytes):
                data = os.pread(fd, geometry.header_bytes, place * geometry.slot_bytes)
                slot = number * geometry.slots_per_segment + place
                header = header_of(data, geometry, slot)
                if header is not None:
                    held[slot] = (header.key, header.sequence)
        finally:
            os.close(fd)
    return held, max((sequence for _, sequence in held.values()), default=-1)


def header_of(data: bytes | memoryview, geometry: Geometry, slot: int) -> SlotHeader | None:
    """Returns the header, or None if it is damaged or belongs to another slot or geometry."""
    try:
        header = decode_header(data)
    except FormatError:
        return None
    return header if header.geometry == geometry and header.slot == slot else None


def _present(held: Held, folder: Path, geometry: Geometry, num_slots: int) -> Held:
    """Drops slots that do not exist, and keeps each block once: where it was used last."""
    whole_slots = {
        number: path.stat().st_size // geometry.slot_bytes
        for number, path in segments_in(folder).items()
    }
    newest: dict[BlockKey, int] = {}
    for slot, (key, sequence) in held.items():
        segment, place = divmod(slot, geometry.slots_per_segment)
        if slot >= num_slots or place >= whole_slots.get(segment, 0):
            continue
        if key not in newest or held[newest[key]][1] < sequence:
            newest[key] = slot
    return {slot: held[slot] for slot in newest.values()}


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
