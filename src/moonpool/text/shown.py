"""Values and names from a model's files as errors show them: short, and in one line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

MAX_CHARS = 80
NAMED_AT_MOST = 5
_LIMITS = reprlib.Repr()
_LIMITS.maxstring = _LIMITS.maxother = _LIMITS.maxlong = MAX_CHARS


def shown(value: object) -> str:
    """The value as Python writes it, cut if it is long."""
    text = _LIMITS.repr(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def shown_name(name: str) -> str:
    """A name as it is, if it is a short line."""
    return name if name.isprintable() and len(name) <= 2 * MAX_CHARS else shown(name)


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    named = list(names)
    more = f" and {len(named) - NAMED_AT_MOST} more" if len(named) > NAMED_AT_MOST else ""
    return ", ".join(map(shown_name, named[:NAMED_AT_MOST])) + more
