"""Tests the learned factor: it is bounded, converges, and is robust against bursts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cost.online import (
    MAX_FACTOR,
    MIN_CHANGE,
    MIN_SAMPLES,
    STEPS_PER_SAMPLE,
    WINDOW,
    LearnedFactor,
)

ENOUGH = MIN_SAMPLES * STEPS_PER_SAMPLE + 1
"""A sample ends with the next event."""
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=300))
def test_it_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    factor = LearnedFactor()
    for seconds, expected_s in seen:
        before = factor.value
        changed = factor.observe(seconds, expected_s)
        assert changed == (factor.value != before)
        assert 1 / MAX_FACTOR <= factor.value <= MAX_FACTOR
    assert len(factor.samples) <= WINDOW
    assert list(factor.samples) == sorted(factor.samples)


@given(
    st.floats(1 / MAX_FACTOR, MAX_FACTOR), st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=5)
)
def test_a_constant_factor_is_found(true: float, expected_s: list[float]) -> None:
    factor = LearnedFactor()
    for number in range(ENOUGH):
        each_s = expected_s[number % len(expected_s)]
        factor.observe(true * each_s, each_s)
    assert factor.value == pytest.approx(true, rel=1.05 * MIN_CHANGE)


def test_a_higher_quantile() -> None:
    median, high = LearnedFactor(summed=1), LearnedFactor(share=0.9, summed=1)
    for number in range(WINDOW):
        for factor in (median, high):
            factor.observe(1.0 + number / 10, 1.0)
    assert median.value == pytest.approx(2.5, rel=0.03)
    assert sum(sample <= high.value for sample in high.samples) >= 0.85 * WINDOW


def test_samples_are_clamped() -> None:
    for true, believed in ((1000.0, MAX_FACTOR), (1e-6, 1 / MAX_FACTOR)):
        factor = LearnedFactor()
        for _ in range(ENOUGH):
            factor.observe(true, 1.0)
        assert factor.value == believed


def test_a_few_observations_change_nothing() -> None:
    factor = LearnedFactor()
    for _ in range(ENOUGH - 1):
        assert not factor.observe(3.0, 1.0)
    assert factor.value == 1.0
    assert factor.observe(3.0, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_burst_of_a_tenth_moves_it_little(seed: int) -> None:
    rng = Random(seed)
    factor = LearnedFactor()
    errors = []
    for number in range(2000):
        usual = 2.0 * rng.uniform(0.9, 1.1)
        storm = rng.choice((50.0, 0.001)) if rng.random() < 0.1 else 1.0
        factor.observe(usual * storm, 1.0)
        if number > WINDOW * STEPS_PER_SAMPLE:
            errors.append(abs(factor.value / 2.0 - 1.0))
    assert max(errors) < 0.25
    assert sum(errors) / len(errors) < 0.05


def test_the_first_steps_count_only_if_they_are_far_off() -> None:
    for true, believed in ((1.4, 1.0), (3.0, 2.0), (9.0, MAX_FACTOR), (0.2, 0.6), (0.7, 1.0)):
        factor = LearnedFactor()
        assert not factor.begin()
        factor.observe(true, 1.0)
        assert factor.value == 1.0
        assert factor.begin() == (believed != 1.0)
        assert factor.value == pytest.approx(believed)


def test_a_step_under_way_only_says_that_it_takes_so_long() -> None:
    factor = LearnedFactor()
    assert not factor.begin(1.0, 1.0)
    assert factor.begin(3.0, 1.0)
    assert factor.value == 2.0
    assert not factor.begin(0.1, 1.0), "another one has begun"
    factor.observe(5.0, 1.0)
    assert factor.begin() and factor.value == 3.0


@given(st.lists(st.tuples(st.sampled_from(["see", "begin", "inherit"]), ANY_FLOAT, ANY_FLOAT)))
def test_it_stays_within_its_bounds_from_the_first_step(
    events: list[tuple[str, float, float]],
) -> None:
    factor = LearnedFactor()
    for what, one, other in events:
        before = factor.value
        if what == "see":
            changed = factor.observe(one, other)
        elif what == "begin":
            changed = factor.begin(one, other)
        else:
            value = 1.0 if one != one else min(max(one, 1 / MAX_FACTOR), MAX_FACTOR)
            changed = factor.inherit(value)
        assert changed == (factor.value != before)
        assert 1 / MAX_FACTOR <= factor.value <= MAX_FACTOR


def test_what_others_have_learned_is_where_it_begins() -> None:
    factor = LearnedFactor()
    assert factor.inherit(3.0) and not factor.inherit(3.0)
    factor.observe(1.0, 1.0)
    assert not factor.inherit(4.0)
    assert factor.begin() and factor.value == 2.0


def test_old_samples_are_forgotten() -> None:
    factor = LearnedFactor()
    for _ in range(1000):
        factor.observe(3.0, 1.0)
    for _ in range((WINDOW // 2 + 1) * STEPS_PER_SAMPLE + 1):
        factor.observe(1.0, 1.0)
    assert factor.value == 1.0


def test_requests_that_share_steps_cause_no_error() -> None:
    """The measurement attributes a part of one request's time to the other; together they took the
    expected time."""
    factor = LearnedFactor()
    for number in range(400):
        factor.observe(1.6 if number % 2 else 0.4, 1.0)
        assert factor.value == 1.0


def test_requests_that_end_together_count_together() -> None:
    """In steps of five requests, the first request seems to take all of the time, and the other
    four none."""
    factor = LearnedFactor()
    for _ in range(ENOUGH):
        factor.observe(6.0, 1.0)
        for _ in range(4):
            factor.observe(0.0, 1.0)
    assert factor.value == pytest.approx(6.0 / 5.0)


def test_long_requests_make_up_most_of_a_queue() -> None:
    """Nine short requests take a third of their expected time, and one long request takes twice its
    expected time."""
    factor = LearnedFactor(summed=1)
    for number in range(WINDOW):
        long = number % 10 == 0
        factor.observe(200.0 if long else 0.3, 100.0 if long else 1.0)
    assert factor.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        (float("nan"), 1.0),
        (1.0, float("nan")),
        (-1.0, 1.0),
        (1.0, 0.0),
        (float("inf"), 1.0),
        (1.0, 1e308),
    ],
)
def test_invalid_times_are_ignored(seconds: float, expected_s: float) -> None:
    factor = LearnedFactor()
    for _ in range(1000):
        assert not factor.observe(seconds, expected_s)
    assert factor.samples == ()
