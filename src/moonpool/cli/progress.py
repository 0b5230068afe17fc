"""A progress bar, which is shown only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def progress(label: str, *columns: Any) -> Iterator[Callable[[int, int | None], None]]:
    """Yields `show(done, total)`, which draws a bar with these further columns if stderr is a
    terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = (*Progress.get_default_columns(), *columns)
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        last_s = 0.0

        def show(done: int, total: int | None) -> None:
            nonlocal last_s
            if time.monotonic() - last_s > 0.2:  # not more often, because drawing takes time
                last_s = time.monotonic()
                bar.update(task, completed=done, total=total)

        yield show


def follow(rows: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    """Yields the rows, and draws how many there were."""
    if not sys.stderr.isatty():
        yield from rows
        return
    with progress(what) as show:
        for done, row in enumerate(rows, 1):
            yield row
            show(done, total)
