"""Tests intervals and verdicts against published tables."""

from __future__ import annotations

from random import Random

import pytest

from moonpool.plan.confidence import (
    Attainment,
    Verdict,
    highest_low,
    interval,
    least_mean,
    least_next_share,
    sample_interval,
)


@pytest.mark.parametrize(
    ("confidence", "num_runs", "t"),
    [
        (0.95, 2, 12.706),
        (0.95, 3, 4.303),
        (0.95, 6, 2.571),
        (0.95, 31, 2.042),
        (0.99, 10, 3.250),
        (0.5, 5, 0.741),
    ],
)
def test_the_spread_of_runs_counts_by_student_s_t(
    confidence: float, num_runs: int, t: float
) -> None:
    number = 10**12  # so many requests that Wilson's interval has no width
    shares = [0.5 + 1e-3 * (i - (num_runs - 1) / 2) for i in range(num_runs)]
    runs = [Attainment(number, round(number * share)) for share in shares]
    deviation = (sum((share - 0.5) ** 2 for share in shares) / (num_runs - 1)) ** 0.5
    found = interval(runs, confidence)
    assert (found.high - found.mean) / deviation * num_runs**0.5 == pytest.approx(t, abs=0.002)


def test_one_run_has_wilson_s_interval() -> None:
    found = interval([Attainment(100, 90)], 0.95)
    assert (found.low, found.high) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert interval([Attainment(10, 0)], 0.95).low == pytest.approx(0.0, abs=1e-12)
    assert interval([Attainment(10, 10)], 0.95).high == pytest.approx(1.0)


def test_runs_that_agree_leave_at_least_what_their_requests_say() -> None:
    same = interval([Attainment(100, 90)] * 4, 0.95)
    whole = interval([Attainment(400, 360)], 0.95)
    assert (same.low, same.high) == pytest.approx((whole.low, whole.high))


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


def test_another_sample_is_less_certain_than_the_mean_of_samples() -> None:
    """Student's t for five degrees of freedom is 2.571."""
    number = 10**9
    runs = [Attainment(number, round(number * (0.90 + 0.01 * i))) for i in range(6)]
    found = sample_interval(runs, 0.95)
    deviation = 0.0187083
    assert found.mean == pytest.approx(0.925)
    assert found.high - found.mean == pytest.approx(2.571 * deviation * (7 / 6) ** 0.5, rel=1e-3)


def test_few_requests_say_little_of_another_sample() -> None:
    one = sample_interval([Attainment(1, 1)] * 7, 0.95)
    assert one.low < 0.3 and one.high == 1.0
    assert sample_interval([Attainment(160, 160)] * 7, 0.95).low == pytest.approx(0.977, abs=1e-3)


def most_low(known: list[Attainment]) -> float:
    return highest_low([run.share for run in known], 7, 0.9, 0.95)[0]


def test_no_further_runs_lift_the_interval_above_what_was_said() -> None:
    draw, number = Random(5), 10**6
    for _ in range(60):
        known = [Attainment(number, draw.randint(900_000, number)) for _ in range(3)]
        most = most_low(known)
        for _ in range(40):
            begin = draw.randint(900_000, number)  # draws equal runs, or different ones
            others = [Attainment(number, draw.randint(begin, number)) for _ in range(4)]
            assert sample_interval([*known, *others], 0.95).low <= most + 1e-9


def test_what_was_said_of_further_runs_is_reached() -> None:
    number = 10**6
    known = [Attainment(number, 940_000), Attainment(number, 904_200), Attainment(number, 915_000)]
    reached = max(
        sample_interval([*known, *[Attainment(number, at)] * 4], 0.95).low
        for at in range(900_000, number, 500)
    )
    most = most_low(known)
    assert most == pytest.approx(reached, abs=1e-5)
    assert most < 0.9  # so this is not sure, although each run reaches the goal


def test_a_run_below_what_the_next_must_have_ends_all_hope() -> None:
    draw, number = Random(7), 10**6
    for _ in range(30):
        known = [Attainment(number, draw.randint(905_000, number)) for _ in range(3)]
        least = least_next_share(known, 7, 0.9, 0.95, 1e-6)
        if least is None:
            assert most_low(known) < 0.9
            continue
        above = [*known, Attainment(number, round(number * min(least + 1e-4, 1.0)))]
        assert most_low(above) >= 0.9 - 1e-5
        if least > 0.9005:
            below = [*known, Attainment(number, round(number * (least - 4e-4)))]
            assert most_low(below) < 0.9
    assert least_next_share([Attainment(number, 930_000)] * 6, 7, 0.9, 0.95, 1e-6) is not None


def test_what_is_sure_is_never_given_up() -> None:
    """A series of runs that is sure in the end must not be given up before. Runs of too few
    requests are never sure."""
    draw = Random(1)
    for _ in range(60):
        number = draw.choice([30, 50, 100, 300])
        runs = [Attainment(number, round(number * draw.uniform(0.9, 1))) for _ in range(7)]
        if sample_interval(runs, 0.95).low < 0.9:
            continue
        for known in range(1, 7):
            least = least_next_share(runs[:known], 7, 0.9, 0.95, 1e-6, number)
            assert least is not None and runs[known].share >= least
    for number, low in ((30, False), (60, True)):
        is_sure = sample_interval([Attainment(number, number)] * 7, 0.95).low >= 0.9
        assert is_sure is low is (least_mean(number, 0.9, 0.95) <= 1.0)
