"""A bar of what is done, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `show(done, total)`, which draws a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        last_s = 0.0

        def show(done: int, total: int) -> None:
            nonlocal last_s
            if time.monotonic() - last_s > 0.2:  # drawing is not free
                last_s = time.monotonic()
                bar.update(task, completed=done, total=total)

        yield show
