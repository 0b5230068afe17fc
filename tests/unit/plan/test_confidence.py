"""Intervals and verdicts, against tables."""

from __future__ import annotations

import pytest

from moonpool.plan.confidence import Attainment, Verdict, interval, student_t, wilson


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 5, 2.571),
        (0.95, 30, 2.042),
        (0.99, 9, 3.250),
        (0.5, 4, 0.741),
    ],
)
def test_student_t_is_the_table_s(confidence: float, freedom: int, t: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(t, abs=0.001)


def test_wilson_is_the_textbook_s() -> None:
    assert wilson(0.9, 100, 0.95) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert wilson(0.0, 10, 0.95)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson(1.0, 10, 0.95)[1] == pytest.approx(1.0)


def test_runs_that_agree_leave_at_least_what_their_requests_say() -> None:
    same = interval([Attainment(100, 90)] * 4, 0.95)
    assert (same.low, same.high) == pytest.approx(wilson(0.9, 400, 0.95))


def test_runs_that_differ_widen_it() -> None:
    found = interval([Attainment(10_000, 9_000), Attainment(10_000, 9_600)], 0.95)
    assert found.mean == pytest.approx(0.93)
    assert found.high == 1.0 and found.low == pytest.approx(0.93 - 12.706 * 0.03, abs=1e-3)
    assert found.verdict(0.9) is Verdict.UNCLEAR


def test_verdicts() -> None:
    runs = [Attainment(10_000, 9_000)] * 3
    assert interval(runs, 0.95).verdict(0.88) is Verdict.MEETS
    assert interval(runs, 0.95).verdict(0.92) is Verdict.MISSES
    assert interval(runs, 0.95).verdict(0.901) is Verdict.UNCLEAR
    assert interval([Attainment(0, 0)], 0.95).mean == 0.0
