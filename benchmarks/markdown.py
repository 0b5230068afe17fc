"""Functions for all generated pages: tables, code within a line, and the origin of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Returns a table, with a line break at its end."""
    names = tuple(header)
    lines = (names, ("---",) * len(names), *rows)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def plain(text: str) -> str:
    """Returns text that splits no cell of a table."""
    return text.replace("|", "/")


def code(text: str) -> str:
    """Returns text as code, for a cell of a table or a sentence."""
    shown = plain(text).replace("`", "'")
    return f"`{shown}`"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def measured_by(found: Mapping[str, Any]) -> str:
    """Returns a sentence about a result's `origin`, without its last period."""
    origin = found["origin"]
    command = " ".join(origin["command"].split())
    return f"Measured by `{command}` at {origin['commit']} on {origin['machine']}"
