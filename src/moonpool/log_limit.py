"""Bounds the log lines that strangers can cause: refused connections, malformed requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_LINES = 10
EVERY_S = 10.0
_MAX_TEXTS = 256


class LogLimit(logging.Filter):
    """Passes at most MAX_LINES lines of the same text every EVERY_S seconds, and counts the others.

    Lines are alike if they have the same unformatted text. Errors always pass. The first line after
    an interval says how many were left out before it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        # text -> (start of its interval, number of lines)
        self._seen: dict[str, tuple[float, int]] = {}

    def forget(self) -> None:
        """Begins again, as if nothing had been logged."""
        self._seen.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now_s, text = self._now(), str(record.msg)
        since_s, lines = self._seen.get(text, (now_s, 0))
        left_out = 0
        if now_s - since_s >= EVERY_S:
            left_out, since_s, lines = max(lines - MAX_LINES, 0), now_s, 0
        if text not in self._seen and len(self._seen) >= _MAX_TEXTS:
            self._seen.clear()
        self._seen[text] = (since_s, lines + 1)
        if lines >= MAX_LINES:
            return False
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} such lines were left out)"
            record.args = ()
        return True


def limited_logger(name: str) -> logging.Logger:
    """Returns the logger of this name, with a limit on lines that are alike."""
    logger = logging.getLogger(name)
    if not any(isinstance(present, LogLimit) for present in logger.filters):
        logger.addFilter(LogLimit())
    return logger
