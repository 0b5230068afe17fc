"""Tests log lines about the loading of weights: some for a slow model, none for a fast one."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from moonpool_engine.engine.load_progress import reported


@pytest.mark.parametrize(
    ("pace_s", "drawn", "lines"),
    [(0.1, [2], []), (1.0, [0, 1, 2, 3], []), (3.0, [0, 1, 2, 3], [1, 3])],
)
def test_a_slow_load_is_logged_and_a_fast_one_is_not(
    caplog: pytest.LogCaptureFixture, pace_s: float, drawn: list[int], lines: list[int]
) -> None:
    clock = count()
    with caplog.at_level(logging.INFO, "moonpool.worker"):
        assert list(reported(range(2, 6), lambda: next(clock) * pace_s)) == [2, 3, 4, 5]
    records = [vars(record) for record in caplog.records]
    assert [(r["done"], r["total"]) for r in records] == [(number, 4) for number in drawn]
    said = [r["message"] for r in records if not r["only_drawn"]]
    assert said == [f"loading weights: {number} of 4 layers" for number in lines]
