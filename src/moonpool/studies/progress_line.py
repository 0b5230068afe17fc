"""Shows a line of progress in notebooks, which is overwritten and removed at the end."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any
from uuid import uuid4

EVERY_S = 0.3
WIDTH = 20


class ProgressLine:
    """Shows a bar and a text, at most three times a second. A notebook shows them as an output of
    the cell; elsewhere they go to stderr."""

    def __init__(self, shows: bool | None) -> None:
        """If `shows` is None, the line appears only in a notebook."""
        is_notebook = "ipykernel" in sys.modules
        self._shows = is_notebook if shows is None else shows
        self._display: Any = importlib.import_module("IPython.display") if is_notebook else None
        self._name = uuid4().hex
        self._last_s = 0.0
        self._length = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._length:
            self._write("")

    def show(self, share: float, text: str) -> None:
        """Shows the line. `share` is the share of the work that is done, from 0 to 1."""
        now_s = time.monotonic()
        if not self._shows or now_s - self._last_s < EVERY_S:
            return
        self._last_s = now_s
        full = round(WIDTH * min(max(share, 0.0), 1.0))
        self._write(f"[{'#' * full}{' ' * (WIDTH - full)}] {text}")

    def _write(self, text: str) -> None:
        if self._display is not None:
            # An output on stderr would stay in the notebook as an empty, coloured line.
            shown = {"text/plain": text, **({} if text else {"text/html": ""})}
            place = {"raw": True, "display_id": self._name}
            self._display.display(shown, update=bool(self._length), **place)
        else:
            sys.stderr.write(f"\r{text:<{self._length}}" + ("" if text else "\r"))
            sys.stderr.flush()
        self._length = len(text)
