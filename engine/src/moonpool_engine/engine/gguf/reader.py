"""Reads the header of a GGUF file, or of all its parts, and maps its tensors.

A file may be damaged or hostile. Every count and length is compared with the remaining bytes before
memory of that size is allocated, so reading allocates no more than a few times the header's size.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.gguf.part_names import part_names
from moonpool_engine.engine.quantized.sizes import SIZES

if TYPE_CHECKING:
    from torch import Tensor

    from moonpool_engine.engine.quantized.matrix import StoredRows

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
_QUANTIZED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
_OTHER = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `shape` as in torch (rows first), `begin` and `end` are offsets in its part."""

    kind: str  # the name of the tensor's type
    shape: tuple[int, ...]
    begin: int
    end: int
    part: int = 0  # number of the model's file that has the tensor

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    def span(self, first: int, count: int | None) -> tuple[int, int, int]:
        """Offset and bytes of `count` rows from the row `first`, and their count; None means
        all."""
        count = self.num_rows - first if count is None else count
        row = (self.end - self.begin) // self.num_rows
        return self.begin + first * row, count * row, count


class GgufPart(NamedTuple):
    """One mapped file."""

    path: Path
    mapping: mmap.mmap  # mapped memory, to which nothing is written
    version: tuple[int, ...]  # changes if another file takes the path, or if this file is written


class StoredTexts:
    """An array of texts in a mapped file. Texts are decoded at their first use, because a
    vocabulary has hundreds of thousands of them and a reader of weights needs none."""

    def __init__(self, mapping: mmap.mmap, starts: array[int]) -> None:
        """`starts`: where each text begins, and a position 8 bytes after the end of the last
        text."""
        self._mapping = mapping
        self._starts = starts

    @cached_property
    def texts(self) -> list[str]:
        # Other readers accept texts that are not UTF-8, and some tokens are such.
        data = self._mapping
        return [data[a : b - 8].decode("utf-8", "replace") for a, b in pairwise(self._starts)]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The checked headers of a model's file, or of its parts. Arrays of numbers are numpy arrays,
    those of texts are `StoredTexts`."""

    path: Path  # path of the first part
    metadata: Mapping[str, Any]  # metadata of the first part
    tensors: Mapping[str, TensorEntry]
    parts: tuple[GgufPart, ...]

    def stored(self, entry: TensorEntry, begin: int, end: int) -> Tensor:
        """Bytes of the part that has the tensor; they stay in the mapped file."""
        import torch

        return torch.frombuffer(self.parts[entry.part].mapping, dtype=torch.uint8)[begin:end]

    def release(self) -> None:
        """Drops the pages that were read: what was returned is read from the files again when it is
        used."""
        for part in self.parts:
            part.mapping.madvise(mmap.MADV_DONTNEED)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is not quantized, in its own dtype; its bytes stay in the mapped file."""
        import torch

        entry = self.tensors[name]
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        stored = self.stored(entry, entry.begin, entry.end)
        return stored.view(dtypes[entry.kind]).view(entry.shape)

    def rows(self, name: str, first: int = 0, count: int | None = None) -> StoredRows:
        """Rows of a quantized tensor; their bytes stay in the mapped file."""
        entry = self.tensors[name]
        begin, size, count = entry.span(first, count)
        return _stored_rows(entry, self.stored(entry, begin, begin + size), count)

    def read_rows(self, name: str, first: int = 0, count: int | None = None) -> StoredRows:
        """Reads rows of a quantized tensor into memory: on virtual machines this takes a tenth of
        the time of the page faults of a mapping. Raises `ModelError`."""
        import torch

        entry = self.tensors[name]
        begin, size, count = entry.span(first, count)
        part = self.parts[entry.part]
        data = torch.empty(size, dtype=torch.uint8)
        rest = data.numpy().data
        try:
            with part.path.open("rb", buffering=0) as file:
                if _version(file.fileno()) != part.version:
                    raise ModelError(f"{part.path} changed while it was loaded: start again")
                file.seek(begin)
                while rest:
                    num_read = file.readinto(rest)
                    if not num_read:
                        raise ModelError(f"{part.path} is cut off at tensor {name!r}")
                    rest = rest[num_read:]
        except OSError as error:
            raise ModelError(f"{part.path} is not readable: {error.strerror}") from None
        return _stored_rows(entry, data, count)


def _stored_rows(entry: TensorEntry, data: Tensor, count: int) -> StoredRows:
    from moonpool_engine.engine.quantized.formats import FORMATS
    from moonpool_engine.engine.quantized.matrix import StoredRows

    return StoredRows(FORMATS[entry.kind], data.view(count, -1))


def _version(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header. If `path` is the first of several parts, reads all headers.

    Raises `ModelError` with one line."""
    metadata, tensors, first = _read_part(path)
    count = _split_number(first, metadata, "count", default=0)
    if count <= 1:
        return GgufFile(path, metadata, tensors, (first,))
    parts, tensors = [first], dict(tensors)
    for number, name in enumerate(_names(first, metadata, count)[1:], 1):
        own, found, part = _read_part(path.with_name(name))
        _check_split_number(part, own, "no", number)
        _check_split_number(part, own, "count", count)
        for tensor, entry in found.items():
            if tensor in tensors:
                other = parts[tensors[tensor].part].path
                raise ModelError(f"{other} and {part.path} both have the tensor {tensor!r}")
            tensors[tensor] = replace(entry, part=number)
        parts.append(part)
    expected = _split_number(first, metadata, "tensors.count", default=len(tensors))
    if expected != len(tensors):
        raise ModelError(
            f"the {count} parts of {path} have {len(tensors)} tensors, but split.tensors.count is "
            f"{expected}"
        )
    return GgufFile(path, metadata, tensors, tuple(parts))


def _names(first: GgufPart, metadata: Mapping[str, Any], count: int) -> list[str]:
    """The names of the parts. Raises ModelError."""
    path = first.path
    names = part_names(path.name)
    if len(names) != count:
        raise ModelError(
            f"{path} is one part of several (split.count is {count}): keep the names that "
            "llama-gguf-split gave, NAME-00001-of-00003.gguf, with all parts in one folder"
        )
    if path.name != names[0]:
        raise ModelError(f"{path} is not the first part of the model: give {names[0]}")
    _check_split_number(first, metadata, "no", 0)
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise ModelError(
            f"{path} is the first of {count} parts, of which {len(missing)} are missing in its "
            f"folder, first {missing[0]}"
        )
    return names


def _check_split_number(part: GgufPart, own: Mapping[str, Any], name: str, expected: int) -> None:
    found = _split_number(part, own, name, default=-1)
    if found != expected:
        raise ModelError(
            f"{part.path} is no part of this model: its split.{name} is "
            f"{'missing' if found < 0 else found}, not {expected}"
        )


def _split_number(part: GgufPart, own: Mapping[str, Any], name: str, default: int) -> int:
    value = own.get(f"split.{name}", default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{part.path}: split.{name} is no whole number")
    return value


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry], GgufPart]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ModelError(f"{path} is cut off: {size} bytes are no GGUF file")
            # A private mapping is writable for torch; nothing is written to it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            version = _version(file.fileno())
    except OSError as error:
        raise ModelError(f"{path} is not readable: {error.strerror}") from None
    header = _Header(path, mapped)
    metadata, tensors = header.read()
    return metadata, tensors, GgufPart(path, mapped, version)


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        """Returns the metadata, and the tensors by name. Raises ModelError for a damaged header."""
        if self._take(4) != MAGIC:
            raise self._error("does not begin with GGUF: not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            why = "is big-endian" if swapped in VERSIONS else f"has version {version}"
            raise self._error(f"{why}; only little-endian versions 2 and 3 are read")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        # A tensor's entry takes at least 24 bytes, a key's 13.
        if num_tensors * 24 + num_keys * 13 > self._end - self._at:
            raise self._error(
                f"claims {num_tensors} tensors and {num_keys} keys, more than fit in it"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key", MAX_NAME_BYTES)
            if key in metadata:
                raise self._error(f"has the key {key!r} twice")
            metadata[key] = self._value(key, self._number("I"))
        entries = self._entries(num_tensors)
        return metadata, self._placed(entries, _alignment(self, metadata))

    def _entries(self, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Returns kind, shape and offset of each tensor, by name."""
        entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._text("a tensor's name", MAX_NAME_BYTES)
            if name in entries:
                raise self._error(f"has the tensor {name!r} twice")
            dimensions = self._number("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._error(f"tensor {name!r} has {dimensions} dimensions, not 1 to 4")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            kind = self._kind(name, self._number("I"))
            entries[name] = (kind, shape, self._number("Q"))
        return entries

    def _kind(self, name: str, number: int) -> str:
        if number in _PLAIN:
            return _PLAIN[number]
        if number in _QUANTIZED:
            return _QUANTIZED[number]
        known = _OTHER.get(number, f"the unknown type {number}")
        served = ", ".join([*_PLAIN.values(), *_QUANTIZED.values()])
        raise self._error(f"tensor {name!r} is of {known}; supported: {served}")

    def _placed(
        self, entries: dict[str, tuple[str, tuple[int, ...], int]], alignment: int
    ) -> dict[str, TensorEntry]:
        data_start = -(-self._at // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        for name, (kind, shape, offset) in entries.items():
            group, size = (1, 4 if kind == "F32" else 2)
            if kind in SIZES:
                group, size = SIZES[kind]
            if min(shape) < 1 or shape[-1] % group:
                raise self._error(
                    f"tensor {name!r} has the shape {list(shape)}, whose rows are no multiple of "
                    f"{group}, as {kind} needs"
                )
            begin = data_start + offset
            end = begin + prod(shape) // group * size
            if offset % alignment or end > len(self._data):
                raise self._error(
                    f"tensor {name!r} lies at bytes {begin} to {end} of {len(self._data)}: "
                    "the file is cut off or damaged"
                )
            placed[name] = TensorEntry(kind, shape, begin, end)
        ordered = sorted(placed.items(), key=lambda item: item[1].begin)
        for (first, one), (second, other) in pairwise(ordered):
            if one.end > other.begin:
                raise self._error(f"tensors {first!r} and {second!r} overlap")
        return placed

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"the value of {key!r}", self._end)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"the key {key!r} is of the unknown type {kind}")
        if kind == _BOOL:
            return self._take(1) != b"\0"
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> Any:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise self._error(f"the key {key!r} is an array of arrays, which is not supported")
        if kind == _STRING:
            if count * 8 > self._end - self._at:
                raise self._error(f"the key {key!r} claims {count} texts, more than fit in it")
            return self._texts(f"a value of {key!r}", count)
        if kind not in _SCALARS:
            raise self._error(f"the key {key!r} is an array of the unknown type {kind}")
        code = "B" if kind == _BOOL else _SCALARS[kind]
        data = self._take(count * struct.calcsize(code))
        return np.frombuffer(data, dtype=np.dtype(code).newbyteorder("<"))

    def _texts(self, what: str, count: int) -> StoredTexts:
        """Steps over texts, and checks their lengths as `_text` does, in one loop."""
        data, end, at = self._data, self._end, self._at
        unpack = struct.Struct("<Q").unpack_from
        starts = array("q", [at + 8])
        for _ in range(count):
            if end - at < 8:
                break
            (length,) = unpack(data, at)
            if length > end - at - 8:
                break
            at += 8 + length
            starts.append(at + 8)
        self._at = at
        if len(starts) <= count:
            self._text(what, end)  # raises
        return StoredTexts(data, starts)

    def _text(self, what: str, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._error(f"{what} claims {length} bytes")
        # Other readers accept texts that are not UTF-8, and some tokens are such.
        return self._take(length).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise self._error(f"is cut off: its header needs {count} bytes at {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._path} {text}")


def _alignment(header: _Header, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise header._error(f"has the alignment {value!r}, not a power of two")
    if value % 4:
        raise header._error(f"has the alignment {value}, less than a float needs")
    return value
