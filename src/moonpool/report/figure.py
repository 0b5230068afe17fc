"""A figure of the page: title, unit, one sentence how to read it, a key, and the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Figure:
    """`body` is HTML, all else plain text. `key` is (colour, what it stands for)."""

    title: str
    how: str
    body: str
    key: tuple[tuple[str, str], ...] = ()
    wide: bool = False

    def html(self) -> str:
        entries = "".join(
            f'<span><i class="{css}"></i>{escape(words)}</span>' for css, words in self.key
        )
        key = f'<p class="key">{entries}</p>' if entries else ""
        kind = ' class="wide"' if self.wide else ""
        return (
            f"<figure{kind}><figcaption><h3>{escape(self.title)}</h3>"
            f"<p>{escape(self.how)}</p></figcaption>{key}{self.body}</figure>"
        )


def note(words: str) -> str:
    """In the place of a drawing when there is nothing to draw."""
    return f'<p class="none">{escape(words)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names the row, the others are figures."""
    top = "".join(f'<th scope="col">{escape(words)}</th>' for words in head)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(words)}</td>" for words in row[1:])
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
