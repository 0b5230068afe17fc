"""Tests that foreign clients can cause only few log lines, and that omitted lines are counted."""

from __future__ import annotations

import logging

from moonpool.log_limit import EVERY_S, MAX_LINES, LogLimit


def record(text: str, *values: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("x", level, "x", 1, text, values, None)


def test_lines_that_are_alike_are_few_and_counted() -> None:
    now_s = 0.0
    limit = LogLimit(lambda: now_s)
    passed = [limit.filter(record("closed %d", number)) for number in range(1000)]
    assert sum(passed) == MAX_LINES
    assert limit.filter(record("another"))
    assert limit.filter(record("closed %d", 1, level=logging.ERROR))
    now_s = EVERY_S
    last = record("closed %d", 7)
    assert limit.filter(last)
    assert last.getMessage() == f"closed 7 ({1000 - MAX_LINES} such lines were left out)"
