"""Renders the hottest prefixes and the transfers of a frame for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from moonpool.cli.watch.cluster_events import Frame

_FLOWS = (
    ("handed_over", "handed over in"),
    ("sent", "out"),
    ("fetched", "fetched"),
    ("copied", "copied"),
    ("ssd_loaded", "SSD loaded"),
    ("ssd_stored", "SSD stored"),
)
_MOST_PREFIXES = 5
TITLE_LINES = 4
"""Lines of a table besides its rows."""
WIDE_COLUMNS = 110
"""Terminals of at least this width get tables with all columns, and space between them."""


def new_table(is_wide: bool) -> Table:
    """Returns an empty table in the view's style."""
    gap = 1 if is_wide else 0
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, padding=(0, gap))


def pool_tables(frame: Frame, lines: int | None, is_wide: bool) -> list[Table]:
    """Returns the tables that have something to show and fit into `lines`; None means no limit.

    A tenant's frame has none.
    """
    tables = [_hot(frame, is_wide), _transfers(frame, is_wide)]
    shown = [table for table in tables if table is not None]
    while lines is not None and sum(t.row_count + TITLE_LINES for t in shown) > max(lines, 0):
        shown.pop()
    return shown


def _hot(frame: Frame, is_wide: bool) -> Table | None:
    found = frame.get("hot")
    if not found:
        return None
    table = new_table(is_wide)
    table.add_column("hottest prefixes", no_wrap=True)
    for name in ("tokens", "size", "hits", "copies"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("in DRAM of", "on SSD of"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for one in found[:_MOST_PREFIXES]:
        places = [" ".join(sorted(one[tier])) or "-" for tier in ("dram", "ssd")]
        numbers = [f"{one['tokens']:,}", _bytes(one["bytes"]), f"{one['hits']:,}"]
        name = one.get("name") or one["key"][:12]  # a server of an earlier release sends no name
        table.add_row(name, *numbers, str(one["replicas"]), *places)
    return table


def _transfers(frame: Frame, is_wide: bool) -> Table | None:
    moved = [one for one in frame.get("moved", ()) if any(one["bytes"].values())]
    if not moved:
        return None
    flows = [(f, name) for f, name in _FLOWS if is_wide or any(one["bytes"][f] for one in moved)]
    table = new_table(is_wide)
    table.add_column("transfers: per s, total", no_wrap=True)
    for _, name in flows:
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(moved, key=lambda one: str(one["instance_id"])):
        rates = one["bytes_per_s"]
        cells = [
            f"{_bytes(rates[flow]) if rates else '-'}, {_bytes(one['bytes'][flow])}"
            if one["bytes"][flow]
            else "-"
            for flow, _ in flows
        ]
        table.add_row(one["instance_id"], *cells)
    return table


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
