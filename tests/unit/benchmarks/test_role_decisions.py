"""Tests role decisions on seeded days with abrupt shifts: roles must follow most shifts within a
minute, without oscillation."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.suite.cluster.role_days import LEAST_SHIFT, MOST_CHATS, MOST_DOCUMENTS, abrupt_day
from benchmarks.suite.cluster.role_decisions import decided_days


def test_an_abrupt_day_shifts_at_each_phase() -> None:
    day = abrupt_day(3, 5, 300.0)
    documents, chats = (kind.by_hour for kind in day.kinds)
    assert day.day_s == 1500.0 and len(documents) == len(chats) == 5
    shares = [
        d / MOST_DOCUMENTS / (d / MOST_DOCUMENTS + c / MOST_CHATS)
        for d, c in zip(documents, chats, strict=True)
    ]
    steps = [abs(one - other) for one, other in pairwise(shares)]
    assert min(steps) >= LEAST_SHIFT - 1e-9
    assert abrupt_day(3, 5, 300.0) == day != abrupt_day(4, 5, 300.0)


@pytest.mark.long
def test_shifts_are_followed_and_roles_do_not_swing() -> None:
    told: list[str] = []
    found = decided_days(range(20_000, 20_003), 4, 400.0, told.append)
    assert found["shifts"] == 9 and len(told) == 3
    assert found["followed_in_60_s"] >= 0.5  # the first version of the rules followed no shift
    assert found["phases_with_several_turns"] == 0


@pytest.mark.long
def test_hardly_any_phase_of_many_days_swings() -> None:
    found = decided_days(range(30_000, 30_025), 3, 300.0, lambda _: None)
    assert found["followed_in_60_s"] >= 0.45
    assert found["phases_with_several_turns"] <= 0.01 * 3 * found["days"]
