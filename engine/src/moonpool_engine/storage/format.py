"""The format of an instance's SSD folder, byte by byte. This is version 1, little-endian
throughout.

    lock               locked (flock) by the process that uses the folder; contains its pid
    segment-000000 ... slots of `slot_bytes`, `slots_per_segment` to a file; slot n is number
                       n % slots_per_segment of segment n // slots_per_segment
    index              a log of which block is in which slot

A slot is one block with all that is needed to verify it:

    header_bytes       8s magic, u32 version, u32 layers, u64 slice bytes, u32 slots per segment,
                       u32 zero, 32s layout fingerprint, 16s key, u64 slot, u64 sequence,
                       u64 xxh3 of each layer's slice, u64 xxh3 of all before; zeros to a page
    block_bytes        the block as in the arena, layer-major; zeros to a page

The index is 80 bytes (8s magic, u32 version, u32 layers, u64 slice bytes, u32 slots per segment,
u32 zero, 32s fingerprint, u64 xxh3 of all before, zeros) and then records of 40 bytes: u32 kind
(1 held, 2 used, 3 void), u32 slot, u64 sequence, 16s key, u64 xxh3 of all before. The valid record
of a slot is the one with the highest sequence, at any position; the sequence is also the order of
use. A record is written after the data it names, and a slot is voided before it is overwritten, so
a process may die at any byte.

Nothing is synced to the disk, because this is a cache. After a power failure any page may be old,
torn or zero; a header, slice or record that does not match its checksum, or a slot whose header
names another key, slot or layout, is a miss. An index that is missing or whose head is damaged is
rebuilt from the headers of the slots.

This module is pure: it encodes and decodes, and accesses no file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.versions import BLOCK_FORMATS
from moonpool.types import BlockKey

PAGE_BYTES = 4096
SEGMENT_BYTES = 256 << 20
HELD, USED, VOID = 1, 2, 3

_SLOT_MAGIC = b"moonslot"
_INDEX_MAGIC = b"moonindx"
_SLOT = struct.Struct("<8sIIQII32s16sQQ")
_INDEX = struct.Struct("<8sIIQII32s")
_RECORD = struct.Struct("<IIQ16s")
_CHECKSUM = struct.Struct("<Q")
INDEX_HEAD_BYTES = 80
RECORD_BYTES = _RECORD.size + _CHECKSUM.size

checksum = xxhash.xxh3_64_intdigest


class FormatError(Exception):
    """Bytes that do not have the expected format; the text says which."""


class OtherVersionError(FormatError):
    """The data are intact, but another version of moonpool wrote them."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes from which every offset in the folder follows."""

    fingerprint: bytes
    num_layers: int
    slice_bytes: int
    slots_per_segment: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.slice_bytes

    @property
    def header_bytes(self) -> int:
        return _to_page(_SLOT.size + (self.num_layers + 1) * _CHECKSUM.size)

    @property
    def padding_bytes(self) -> int:
        return _to_page(self.block_bytes) - self.block_bytes

    @property
    def slot_bytes(self) -> int:
        return self.header_bytes + self.block_bytes + self.padding_bytes

    @property
    def segment_bytes(self) -> int:
        return self.slots_per_segment * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Returns the slot's offset within its segment."""
        return slot % self.slots_per_segment * self.slot_bytes


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a slot. `checksums`: xxh3 of each layer's slice."""

    geometry: Geometry
    key: BlockKey
    slot: int
    sequence: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A `Record` is one record of the index."""

    kind: int
    slot: int
    sequence: int
    key: BlockKey


NO_KEY = BlockKey(bytes(16))


def make_geometry(layout: BlockLayout, segment_bytes: int = SEGMENT_BYTES) -> Geometry:
    """Returns the geometry of a folder with segments of about `segment_bytes`."""
    one = Geometry(layout.fingerprint, layout.num_layers, layout.slice_bytes, 1)
    slots = max(1, segment_bytes // one.slot_bytes)
    return Geometry(layout.fingerprint, layout.num_layers, layout.slice_bytes, slots)


def encode_header(header: SlotHeader) -> bytes:
    """Returns all bytes of a slot before its block, padded to a page."""
    geometry = header.geometry
    body = _SLOT.pack(
        _SLOT_MAGIC,
        BLOCK_FORMATS.newest,
        geometry.num_layers,
        geometry.slice_bytes,
        geometry.slots_per_segment,
        0,
        geometry.fingerprint,
        header.key,
        header.slot,
        header.sequence,
    )
    body += struct.pack(f"<{geometry.num_layers}Q", *header.checksums)
    body += _CHECKSUM.pack(checksum(body))
    return body.ljust(geometry.header_bytes, b"\0")


def decode_header(data: bytes | memoryview) -> SlotHeader:
    """Decodes the header at the start of `data`, which may be truncated. Raises FormatError."""
    if len(data) < _SLOT.size or bytes(data[: len(_SLOT_MAGIC)]) != _SLOT_MAGIC:
        raise FormatError("no slot begins here")
    fields = _SLOT.unpack_from(data)
    _, version, num_layers, slice_bytes, slots, _, fingerprint, key, slot, sequence = fields
    end = _SLOT.size + num_layers * _CHECKSUM.size
    _verify(data, end, "the slot's header")
    if not BLOCK_FORMATS.includes(version):
        raise OtherVersionError(f"the slot is of format version {version}, not {BLOCK_FORMATS}")
    checksums = struct.unpack_from(f"<{num_layers}Q", data, _SLOT.size)
    geometry = Geometry(fingerprint, num_layers, slice_bytes, slots)
    return SlotHeader(geometry, BlockKey(key), slot, sequence, checksums)


def encode_index_head(geometry: Geometry) -> bytes:
    """Returns the first INDEX_HEAD_BYTES of an index."""
    body = _INDEX.pack(
        _INDEX_MAGIC,
        BLOCK_FORMATS.newest,
        geometry.num_layers,
        geometry.slice_bytes,
        geometry.slots_per_segment,
        0,
        geometry.fingerprint,
    )
    return (body + _CHECKSUM.pack(checksum(body))).ljust(INDEX_HEAD_BYTES, b"\0")


def decode_index_head(data: bytes) -> Geometry:
    """Decodes the head of an index. Raises FormatError."""
    if len(data) < INDEX_HEAD_BYTES or data[: len(_INDEX_MAGIC)] != _INDEX_MAGIC:
        raise FormatError("no index begins here")
    _verify(data, _INDEX.size, "the index's head")
    _, version, num_layers, slice_bytes, slots, _, fingerprint = _INDEX.unpack_from(data)
    if not BLOCK_FORMATS.includes(version):
        raise OtherVersionError(f"the index is of format version {version}, not {BLOCK_FORMATS}")
    return Geometry(fingerprint, num_layers, slice_bytes, slots)


def encode_records(records: Sequence[Record]) -> bytes:
    """Returns the records as they follow the head of an index."""
    parts = []
    for record in records:
        body = _RECORD.pack(record.kind, record.slot, record.sequence, record.key)
        parts.append(body + _CHECKSUM.pack(checksum(body)))
    return b"".join(parts)


def decode_records(data: bytes) -> Iterator[Record | None]:
    """Yields the records of an index without its head, and None for a damaged or truncated
    record."""
    view = memoryview(data)
    for start in range(0, len(data), RECORD_BYTES):
        body = view[start : start + _RECORD.size]
        end = start + RECORD_BYTES
        if end > len(data) or checksum(body) != _CHECKSUM.unpack_from(data, end - 8)[0]:
            yield None
            continue
        kind, slot, sequence, key = _RECORD.unpack(body)
        yield Record(kind, slot, sequence, BlockKey(key))


def _verify(data: bytes | memoryview, end: int, what: str) -> None:
    """Checks that the checksum at `end` is that of all bytes before. Raises FormatError."""
    whole = len(data) >= end + _CHECKSUM.size
    if not whole or checksum(data[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        raise FormatError(f"{what} is damaged")


def _to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
