"""Tests errors of predictions."""

from __future__ import annotations

from random import Random

import pytest

from moonpool.conductor.forecast.estimators import PredictionError


def test_errors_have_sign_and_size() -> None:
    error = PredictionError()
    for predicted, actual in ((2.0, 1.0), (1.0, 4.0), (3.0, 3.0)):
        error.note(predicted, actual)
    assert (error.count, error.mean, error.mean_absolute) == (3, -2 / 3, 4 / 3)
    assert (error.too_much, error.too_little) == (1.0, 3.0)


def test_nothing_was_predicted() -> None:
    assert set(PredictionError().summary().values()) == {0}


def test_quantiles_of_the_ratio_are_within_three_percent() -> None:
    rng, error = Random(1), PredictionError()
    ratios = [2.0 ** rng.uniform(-5, 5) for _ in range(3001)]
    for ratio in ratios:
        error.note(ratio * 0.7, 0.7)
    ratios.sort()
    assert error.ratio(0.5) == pytest.approx(ratios[1500], rel=0.032)
    assert error.ratio(0.9) == pytest.approx(ratios[2700], rel=0.032)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 1.5, 1.999, 2.0, 3.0])
def test_a_single_ratio_is_reported_exactly(ratio: float) -> None:
    error = PredictionError()
    error.note(ratio, 1.0)
    assert error.ratio(0.5) == pytest.approx(ratio, rel=0.001)


def test_a_zero_has_no_ratio() -> None:
    error = PredictionError()
    error.note(0.0, 1.0)
    error.note(1.0, 0.0)
    assert (error.count, error.num_ratios, error.ratio(0.5)) == (2, 0, 0.0)
    assert error.mean_absolute == 1.0
