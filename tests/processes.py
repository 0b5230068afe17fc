"""Lists the processes that a process has started, seen from outside."""

from __future__ import annotations

import os
from pathlib import Path


def children() -> set[int]:
    """Returns the children of this process that have not ended."""
    return set(children_of(os.getpid()))


def children_of(pid: int) -> list[int]:
    """Returns the children of a process that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # skips a process that has ended meanwhile
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found
