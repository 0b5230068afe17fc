"""Tests that a step under way gives no new information before `begins_after_s`, so that nobody has
to ask before."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.cost.online import LearnedFactor

SECONDS = st.floats(1e-6, 1e4)


@settings(max_examples=300, deadline=None)
@given(
    inherited=st.none() | st.floats(0.25, 4.0),
    steps=st.lists(st.tuples(SECONDS, SECONDS), max_size=9),
    expected_s=st.floats(0.0, 1e4),
    first_s=st.floats(1e-9, 1e3),
    later=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8),
)
def test_a_step_under_way_changes_nothing_before_it_is_due(
    inherited: float | None,
    steps: list[tuple[float, float]],
    expected_s: float,
    first_s: float,
    later: list[float],
) -> None:
    factor = LearnedFactor()
    if inherited is not None:
        factor.inherit(inherited)
    for seconds, expected in steps:
        factor.observe(seconds, expected)
    if not expected_s:
        first_s = 0.0
    while factor.begin(first_s, expected_s):
        pass
    due_s = factor.begins_after_s(expected_s)
    for share in later:  # observes before the step is due, when it is due, and after that
        seconds = max(first_s, due_s * share) if expected_s else 0.0
        asked = deepcopy(factor)
        if asked.begin(seconds, expected_s):
            assert seconds >= due_s
            return


def test_it_is_due_when_the_factor_moves_and_not_long_before() -> None:
    factor = LearnedFactor()
    assert not factor.begin(0.5, 2.0)
    due_s = factor.begins_after_s(2.0)  # makes (1 + seconds / 2) / 2 equal to 1.25
    assert abs(due_s - 3.0) < 1e-6
    assert not factor.begin(due_s - 1e-6, 2.0) and factor.begin(3.0, 2.0)
    assert factor.begins_after_s(0.0) == float("inf")
