"""Reads a file line by line with bounded memory, and words the errors that name a line.

It knows nothing of what a line means.
"""

from __future__ import annotations

import stat
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moonpool.trace.row import TraceError

MAX_LINE_BYTES = 8 << 20
"""More than any row needs: a million blocks of seven digits each."""


def error_at(path: Path, number: int, what: str) -> TraceError:
    return TraceError(f"{path}:{number}: {what}")


def open_file(path: Path) -> BinaryIO:
    """The file, open for reading bytes; it must be a regular one, because it is read twice."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise TraceError(f"{path} is no regular file; a trace is read twice, so save it first")
    head = file.read(len(BOM_UTF8))
    if head.startswith(b"\x1f\x8b"):
        file.close()
        raise TraceError(f"{path} is compressed; unpack it first (gunzip)")
    file.seek(len(BOM_UTF8) if head == BOM_UTF8 else 0)  # spreadsheets write the mark
    return file


def read_line(file: BinaryIO, path: Path, number: int) -> bytes:
    """The next line with its end; empty at the end of the file."""
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise error_at(
            path, number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; this is no trace"
        )
    return line


def numbered_lines(file: BinaryIO, path: Path, first: int = 1) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset, line) from the file's position on; blank lines are left out."""
    number = first
    offset = file.tell()
    while line := read_line(file, path, number):
        if not line.isspace():
            yield number, offset, line
        number += 1
        offset += len(line)


def damage(line: bytes) -> str | None:
    """What is wrong with the bytes themselves, if anything."""
    if b"\0" in line:
        return "binary data; this is no text file"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not valid UTF-8; this is no text file, or a damaged one"
    return None


def cut_off(line: bytes) -> str:
    """To be added to an error about a line that may be the last one of a truncated file."""
    if line.endswith(b"\n") or line.lstrip().startswith(b"["):
        return ""
    return " (the file ends here without a newline: it may be cut off; get it anew)"
