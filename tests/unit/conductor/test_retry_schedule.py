"""Tests that rejected requests are told to come back one after another, as fast as requests
complete."""

from __future__ import annotations

from moonpool.conductor.waiting.rules import MAX_RETRY_AFTER_S, STALE_S, RetrySchedule


def busy(until: int = 20) -> RetrySchedule:
    """Completes a request every half second."""
    schedule = RetrySchedule()
    for number in range(2 * until + 1):
        schedule.note_completed(number / 2)
    return schedule


def test_a_crowd_is_spread_by_the_rate_of_completed_requests() -> None:
    schedule = busy()
    assert [schedule.retry_after_s(3.0, 20.0) for _ in range(4)] == [3.0, 3.5, 4.0, 4.5]
    assert schedule.retry_after_s(3.0, 30.0) == 3.0, "the crowd has come back"


def test_without_a_rate_all_get_the_least() -> None:
    schedule = RetrySchedule()
    assert [schedule.retry_after_s(0.1, 0.0) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert [busy().retry_after_s(2.0, 20.0 + STALE_S + 1) for _ in range(2)] == [2.0, 2.0]


def test_nobody_waits_longer_than_the_most() -> None:
    schedule = busy()
    waits_s = [schedule.retry_after_s(1.0, 20.0) for _ in range(1000)]
    assert max(waits_s) == MAX_RETRY_AFTER_S and waits_s == sorted(waits_s)
