"""Lines about weights being loaded: some for a slow model, none for a fast one."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from moonpool.engine.load_progress import reported


@pytest.mark.parametrize(("pace_s", "said"), [(0.0, []), (3.0, ["1 of 4", "2 of 4", "3 of 4"])])
def test_a_slow_load_is_logged_and_a_fast_one_is_not(
    caplog: pytest.LogCaptureFixture, pace_s: float, said: list[str]
) -> None:
    clock = count()
    with caplog.at_level(logging.INFO, "moonpool.worker"):
        assert list(reported(range(2, 6), lambda: next(clock) * pace_s)) == [2, 3, 4, 5]
    lines = [record.getMessage() for record in caplog.records]
    for line in lines:
        assert line.startswith("loading weights: ") and line.endswith(" layers")
    assert bool(lines) is bool(said)
    assert all(any(part in line for part in said) for line in lines)
