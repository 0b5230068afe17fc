"""Writes the part of a page that a command owns; the rest is written by hand.

The part stands between two marks. With `--check` nothing is written; the exit status is 1 if the
page differs from the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PageSection:
    """`command`: the command that writes the section, such as `python -m benchmarks.page_pool`."""

    begin: str
    end: str
    command: str

    def within(self, page: str, section: str) -> str:
        """Returns the page with this section between its marks. Raises ValueError if the page has
        no marks."""
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"the page needs the lines {self.begin} and {self.end}")
        return f"{before}{self.begin}\n\n{section}\n{self.end}{after}"

    def main(self, page: Path, section: Callable[[], str]) -> int:
        """Writes or checks the page. Returns the exit status."""
        try:
            text = page.read_text()
            made = self.within(text, section())
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return write_or_check(page, made, self.command)


def write_or_check(page: Path, made: str, command: str) -> int:
    """Writes the page, or with `--check` compares it. Returns the exit status."""
    if "--check" not in sys.argv[1:]:
        page.write_text(made)
        return 0
    if page.exists() and page.read_text() == made:
        return 0
    sys.stderr.write(f"{page.name} is out of date: run `{command}`\n")
    return 1
