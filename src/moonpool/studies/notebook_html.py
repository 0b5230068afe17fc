"""Writes results for notebooks, as plain HTML that takes the notebook's own look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from moonpool.sim.report.drawing import Drawing
from moonpool.sim.report.plots import ReportFigure

SHOWN_ROWS = 10


class Columns(Protocol):
    """A table that gives its values by column."""

    columns: dict[str, Sequence[Any]]

    def __len__(self) -> int: ...


def table_html(table: Columns) -> str:
    """Returns the first rows of a table, and the number of all its rows."""
    names = list(table.columns)
    values = zip(*(column[:SHOWN_ROWS] for column in table.columns.values()), strict=True)
    body = rows_html(names, values)
    left = len(table) - SHOWN_ROWS
    return body + (f"<p>and {left:,} more rows</p>" if left > 0 else "")


def rows_html(names: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table of values, with numbers rounded to six digits."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ("".join(f"<td>{escape(shown(value))}</td>" for value in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def pairs_html(title: str, pairs: Mapping[str, str]) -> str:
    """Returns a heading, and a table of names and texts."""
    lines = "".join(
        f'<tr><th style="text-align: left; vertical-align: top; white-space: nowrap">'
        f'{escape(name)}</th><td style="text-align: left">{escape(text)}</td></tr>'
        for name, text in pairs.items()
    )
    return f"<p><b>{escape(title)}</b></p><table><tbody>{lines}</tbody></table>"


def drawn(figure: ReportFigure) -> Drawing:
    """Draws one figure of a page. Raises ValueError if there is nothing to draw."""
    if figure.chart is None:
        raise ValueError(f"{figure.title}: {figure.note or 'it is a table'}")
    return Drawing(figure.title, figure.chart)


def shown(value: Any) -> str:
    """Returns a value as text."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
