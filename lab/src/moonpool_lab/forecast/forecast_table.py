"""Keeps a table of forecasts and outcomes: a file of JSON lines that only grows.

Each entry names the hash of the previous entry, and has its own hash. So a changed, missing or
inserted entry breaks the chain, which every reader checks. The chain does not show whether the last
entries were cut off; the table's version control does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FIRST = "0" * 64
"""The first entry has this value in place of the hash of a previous entry."""


class TableError(ValueError):
    """Says that the table cannot be read or extended, why, and what to do."""


Entry = dict[str, Any]


def add_entry(path: Path, entry: Entry) -> str:
    """Adds an entry at the end, and returns its hash once the entry is on the disk.

    Raises TableError if the file cannot be written, or if its content has been changed.
    """
    try:
        with path.open("a+b") as file:
            # the lock is needed because several commands may share a table
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            entries = read_entries(file.read().splitlines(), path.name)
            previous = entries[-1]["hash"] if entries else FIRST
            chained = {**entry, "previous": previous}
            chained["hash"] = _hash_of(chained)
            file.write(_text_of(chained) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TableError(f"cannot write {path}: {error.strerror}") from None
    return str(chained["hash"])


def read_table(path: Path) -> list[Entry]:
    """Returns all entries in order. Raises TableError if the chain is broken."""
    try:
        return read_entries(path.read_bytes().splitlines(), path.name)
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from None


def read_entries(lines: Iterable[bytes], name: str) -> list[Entry]:
    """Returns the entries in the lines of a table. Raises TableError, which names the first broken
    entry."""
    entries: list[Entry] = []
    previous = FIRST
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            intact = entry["previous"] == previous and entry["hash"] == _hash_of(entry)
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise TableError(
                f"line {number} of {name} is not what was once written there: restore the file"
            )
        entries.append(entry)
        previous = entry["hash"]
    return entries


def _hash_of(entry: Entry) -> str:
    bare = {name: value for name, value in entry.items() if name != "hash"}
    return hashlib.sha256(_text_of(bare)).hexdigest()


def _text_of(entry: Entry) -> bytes:
    """Returns the only valid form of an entry, so that a reader can compute its hash again."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
