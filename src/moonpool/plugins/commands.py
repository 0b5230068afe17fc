"""Commands that other packages add, by entry points of the group `moonpool.commands`.

Each entry point names a `CommandTable`, in a module that imports nothing: so `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

GROUP = "moonpool.commands"
CommandTable = Mapping[str, tuple[str, str, str]]
"""Module, attribute and one line of help by the command's name, such as "demo" or "pool verify".
Without help, it is a command that processes start, and not users."""
EXTRA_OF_COMMAND = {
    **dict.fromkeys(("pool verify", "pool clear"), "engine"),
    **dict.fromkeys(
        ("demo", "replay", "compare", "trial", "oracle", "reproduce", "profile", "bench"), "lab"
    ),
}
"""The extra that brings a command which is not there."""


@cache
def added_commands() -> CommandTable:
    """What the packages add that are installed beside this one."""
    from importlib.metadata import entry_points  # here: most commands need none

    found: dict[str, tuple[str, str, str]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found.update(point.load())
    return found
