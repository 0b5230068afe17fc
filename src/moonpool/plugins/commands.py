"""Commands that other packages add, by entry points of the group `moonpool.commands`.

Each entry point names a `CommandTable`, in a module that imports nothing: so `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from moonpool.plugins.entry_points import entry_points, load

GROUP = "moonpool.commands"
CommandTable = Mapping[str, tuple[str, str, str]]
"""Module, attribute and one line of help by the command's name, such as "demo" or "pool verify".
Without help, it is a command that processes start, and not users."""
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
    for _, value in sorted(entry_points(GROUP).items()):
        found.update(load(value))
    return found
