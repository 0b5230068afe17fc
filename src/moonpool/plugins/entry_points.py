"""What installed packages give to moonpool, by entry points.

`importlib.metadata` reads the same files; its import alone takes 20 ms, which every command would
pay.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FOLDERS = (".dist-info", ".egg-info")


def entry_points(group: str) -> Mapping[str, str]:
    """Returns "module:name", or a module, by the names of the group. Where two installations of a
    package are on `sys.path`, the first one counts."""
    found: dict[str, str] = {}
    for text in _texts():
        for name, value in _lines(text, group):
            found.setdefault(name, value)
    return found


def load(value: str) -> Any:
    """Imports the object that an entry point names."""
    module, _, attribute = value.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _texts() -> Iterator[str]:
    seen: set[str] = set()
    for place in sys.path:
        try:
            names = sorted(name for name in os.listdir(place or ".") if name.endswith(_FOLDERS))
        except OSError:  # an archive, or nothing
            continue
        for name in names:
            package = name.rpartition(".")[0].partition("-")[0].lower()
            if package in seen:
                continue
            seen.add(package)
            try:
                yield Path(place, name, "entry_points.txt").read_text(encoding="utf-8")
            except OSError:
                continue


def _lines(text: str, group: str) -> Iterator[tuple[str, str]]:
    is_inside = False
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("["):
            is_inside = line == f"[{group}]"
        elif is_inside and "=" in line:
            name, _, value = line.partition("=")
            yield name.strip(), value.partition("[")[0].strip()
