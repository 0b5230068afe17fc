"""A line of progress for notebooks: it is written over, and gone at the end."""

from __future__ import annotations

import sys
import time

EVERY_S = 0.3
WIDTH = 20


class ProgressLine:
    """Shows a bar and a text on stderr, at most three times a second."""

    def __init__(self, shows: bool | None) -> None:
        """`shows` None: in a notebook alone."""
        self._shows = "ipykernel" in sys.modules if shows is None else shows
        self._last_s = 0.0
        self._length = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._length:
            self._write("")

    def show(self, share: float, text: str) -> None:
        """`share` is that of the work that is done, 0 to 1."""
        now_s = time.monotonic()
        if not self._shows or now_s - self._last_s < EVERY_S:
            return
        self._last_s = now_s
        full = round(WIDTH * min(max(share, 0.0), 1.0))
        self._write(f"[{'#' * full}{' ' * (WIDTH - full)}] {text}")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text:<{self._length}}" + ("" if text else "\r"))
        sys.stderr.flush()
        self._length = len(text)
