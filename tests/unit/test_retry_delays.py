"""Tests the delays after consecutive failures, and when they start again from the shortest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.retry_delays import RetryDelays

SCHEDULE = RetryDelays((0.0, 1.0, 4.0), steady_s=10.0)


def test_the_last_delay_stays() -> None:
    assert [SCHEDULE.after(number) for number in range(6)] == [0.0, 0.0, 1.0, 4.0, 4.0, 4.0]


@given(st.lists(st.floats(0, 20), min_size=1, max_size=20))
def test_what_lasted_long_begins_a_new_row(lasted_s: list[float]) -> None:
    num_failures, expected = 0, 0
    for each_s in lasted_s:
        num_failures = SCHEDULE.count(num_failures, each_s)
        expected = 1 if each_s > 10.0 else expected + 1
        assert num_failures == expected
        assert SCHEDULE.after(num_failures) == (0.0, 1.0, 4.0)[min(expected, 3) - 1]
