"""What installed packages provide to moonpool, by entry points.

`importlib.metadata` reads the same files; its import alone takes 20 ms, which every command would
pay.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FOLDERS = (".dist-info", ".egg-info")


def entry_points(group: str) -> Mapping[str, str]:
    """Returns "module:name", or a module, by the names of the group. If two installations of a
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
        except OSError:  # the path is an archive, or does not exist
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


CommandTable = Mapping[str, tuple[str, str, str]]
"""(module, attribute, line of help) by the command's name, such as "demo" or "pool verify". The
table is in a module that imports nothing, so that `--help` stays quick. A command without help is
started by processes, not by users."""
EXTRA_OF_COMMAND = {
    **dict.fromkeys(("pool verify", "pool clear", "pool serve"), "engine"),
    **dict.fromkeys(
        (
            *("demo", "replay", "compare", "trial", "forecast", "oracle", "reproduce", "profile"),
            "bench",
        ),
        "lab",
    ),
}
"""The extra that adds a command which is missing."""


@cache
def added_commands() -> CommandTable:
    """The commands of the packages that are installed beside this one."""
    found: dict[str, tuple[str, str, str]] = {}
    for _, value in sorted(entry_points("moonpool.commands").items()):
        found.update(load(value))
    return found


def connector_class(engine: str) -> Any:
    """Returns the class that this engine loads to reach the KVCache pool. Raises ImportError if its
    package is absent."""
    value = entry_points("moonpool.connectors").get(engine)
    if value is None:
        from moonpool.installation import install_command

        raise ImportError(
            f"the connector of {engine} is in another package: {install_command('engine')}, in the"
            f" environment of {engine}"
        )
    return load(value)


def plot_function(name: str) -> Callable[..., None]:
    """Returns the function that draws figures of this kind and writes them to a file. Raises
    ModuleNotFoundError, of which the command makes one line, where it is absent."""
    points = entry_points("moonpool.plots")
    if name not in points:
        raise ModuleNotFoundError(name="moonpool_lab")
    found: Callable[..., None] = load(points[name])
    return found
