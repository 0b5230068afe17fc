"""Tests learned chances to meet the SLOs."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.admission.slo_chances import TbtChances, TtftChances

STEP_S, SLO_S = 0.03, 0.035


def learned(answers: list[tuple[int, float]]) -> TbtChances:
    """Learns from answers of (tokens, longest tenth of the gaps over the predicted step)."""
    chances = TbtChances()
    for num_tokens, ratio in answers:
        chances.note_answer(num_tokens, ratio * STEP_S, STEP_S)
    return chances


def test_chances_are_calibrated() -> None:
    random = Random(1)
    answers = [(400, random.uniform(0.9, 1.3)) for _ in range(600)]
    chances = learned(answers)
    for limit in (0.95, 1.0, 1.1, 1.2):
        share = sum(ratio <= limit for _, ratio in answers) / len(answers)
        assert chances.chance(STEP_S, limit * STEP_S) == pytest.approx(share, abs=0.06)


def test_a_few_short_answers_with_long_gaps_do_not_lower_the_chance_of_all() -> None:
    long = [(400, 1.02)] * 180
    with_short = learned([*long, *[(5, 1.7)] * 20])
    assert learned(long).chance(STEP_S, SLO_S) > 0.95
    assert 0.85 < with_short.chance(STEP_S, SLO_S) < 0.95


@given(
    st.lists(st.tuples(st.integers(1, 800), st.floats(0.5, 4.0)), max_size=60),
    st.floats(0.001, 1.0),
    st.floats(1.0, 3.0),
)
@settings(max_examples=60)
def test_a_longer_step_never_has_a_better_chance(
    answers: list[tuple[int, float]], step_s: float, times: float
) -> None:
    chances = learned(answers)
    short, long = chances.chance(step_s, SLO_S), chances.chance(step_s * times, SLO_S)
    assert 0.0 <= long <= short + 1e-9 <= 1.0 + 2e-9


def test_the_best_step_is_near_the_slo_where_gaps_vary_little() -> None:
    base_s = 0.026
    steady = learned([(400, 1.0 + 0.0001 * (i % 100)) for i in range(400)])
    varied = learned([(400, 1.0 + 0.004 * (i % 100)) for i in range(400)])
    assert 0.033 < steady.best_step_s(base_s, SLO_S) <= SLO_S
    assert base_s < varied.best_step_s(base_s, SLO_S) < steady.best_step_s(base_s, SLO_S)


def test_without_an_slo_everything_meets_it() -> None:
    chances = TbtChances()
    assert chances.chance(1.0, float("inf")) == 1.0
    assert chances.best_step_s(0.01, float("inf")) == float("inf")


def test_late_first_tokens_are_learned_from_long_queues_only() -> None:
    chances = TtftChances()
    for _ in range(64):
        # came three times as late as predicted, but far from the SLO
        chances.note_first_token(0.3, 0.1, 30.0)
    assert chances.chance(25.0, 30.0) > 0.95
    for _ in range(64):
        chances.note_first_token(26.0, 20.0, 30.0)
    assert chances.chance(25.0, 30.0) < 0.2 and chances.chance(15.0, 30.0) > 0.9
    assert chances.chance(1.0, 0.0) == 0.0 and chances.chance(0.0, 1.0) == 1.0


def test_late_short_waits_do_not_say_that_a_long_queue_is_late() -> None:
    """A short TTFT depends on the step under way, so it says nothing about long queues. Otherwise,
    the policy would reject prompts for which the SLO leaves time, and would never learn about them
    again."""
    chances = TtftChances()
    for number in range(256):
        chances.note_first_token(2.0 if number % 2 else 0.8, 0.8, 3.0)
        chances.note_first_token(2.5 + 0.01 * (number % 10), 2.5, 3.0)
    assert chances.chance(2.5, 3.0) > 0.95
    assert 0.65 < chances.chance(0.6, 1.2) < 0.85, "between, where there are none: those of all"
    assert chances.chance(0.6, 1.3) > 0.95, "a longer queue is nearer to its prediction"
    assert chances.chance(0.45, 1.35) > 0.9


def test_a_first_burst_is_learned_from_its_first_few_tokens() -> None:
    chances = TtftChances()
    assert chances.chance(2.5, 3.0) > 0.95
    for _ in range(8):
        chances.note_first_token(3.5, 2.5, 3.0)
    assert chances.chance(2.5, 3.0) < 0.5


def test_answers_that_join_between_steps_have_no_long_first_gap_to_begin_with() -> None:
    at_any_time, between = TbtChances(), TbtChances(joins_between=True)
    assert at_any_time.chance(0.9 * SLO_S, SLO_S) < 0.9 < between.chance(0.9 * SLO_S, SLO_S)
    assert between.best_step_s(0.01, SLO_S) > 0.9 * SLO_S


def test_an_answer_without_a_lasting_prediction_teaches_its_length_only() -> None:
    """Otherwise, the policy would take the full steps of answers that began at light load for slow
    ones."""
    chances = TbtChances(joins_between=True)
    before = chances.best_step_s(0.01, SLO_S)
    for _ in range(64):
        chances.note_answer(1, 0.0, 0.0)
    assert chances.chance(2.0 * SLO_S, SLO_S) > 0.6, "answers of one token have no gap"
    for _ in range(4096):
        chances.note_answer(400, 5.0 * STEP_S, 0.0)
    assert chances.chance(2.0 * SLO_S, SLO_S) < 0.1
    assert chances.best_step_s(0.01, SLO_S) == pytest.approx(before, rel=0.05)
