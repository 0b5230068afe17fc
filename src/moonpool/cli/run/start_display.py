"""The lines that `moonpool run` shows while its server starts."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable

QUIET_S = 30.0
"""Without a terminal, a start prints a line each time this many seconds have passed."""
COUNT_FROM_S = 2.0
_ERASE = "\r\x1b[K"
_MOST_WARNINGS = 100


class StartDisplay:
    """On a terminal it draws one line with the server's present work; elsewhere it prints a line
    every `QUIET_S`. The server's warnings stay, each once. With `verbose`, the whole log is shown
    instead, also after the start.

    `take` gets lines of the log from any thread; the other methods are for one thread.
    """

    def __init__(self, verbose: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._verbose = verbose
        self._drawn = sys.stderr.isatty() and not verbose
        self._clock = clock
        self._began_s = self._said_s = clock()
        self._now = "starting the server"
        self._shown = ""
        self._warnings: deque[str] = deque(maxlen=_MOST_WARNINGS)
        self._warned: set[str] = set()
        self._is_up = False

    def take(self, line: str) -> None:
        """Notes a line of the server's log."""
        if self._verbose:
            sys.stderr.write(f"{line}\n")
        elif not self._is_up:
            self._now = line.partition(" INFO ")[2] or self._now
            warning = line.partition(" WARNING ")[2]
            if warning:
                self._warnings.append(warning)

    def look(self) -> None:
        """Shows what has changed."""
        self._warn()
        now_s = self._clock()
        passed_s = now_s - self._began_s
        if self._drawn:
            count = f" ({passed_s:.0f} s)" if passed_s >= COUNT_FROM_S else ""
            width = shutil.get_terminal_size().columns - 1 - len(count)
            line = f"{self._now[:width]}{count}"
            if line != self._shown:
                self._shown = line
                self._write(f"{_ERASE}{line}")
        elif not self._verbose and now_s - self._said_s >= QUIET_S:
            self._said_s = now_s
            self._write(f"moonpool: not ready after {passed_s:.0f} s: {self._now}\n")

    def end(self) -> None:
        """Notes that the server is ready, or has ended."""
        self._warn()
        if self._drawn and self._shown:
            self._shown = ""
            self._write(_ERASE)
        self._is_up = True

    def _warn(self) -> None:
        while self._warnings:
            warning = self._warnings.popleft()
            if warning not in self._warned:
                self._warned.add(warning)
                self._write(f"{_ERASE if self._drawn else ''}moonpool: {warning}\n")
                self._shown = ""

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
