"""Tests predicted lengths of answers."""

from __future__ import annotations

import pytest

from moonpool.conductor.forecast import estimators
from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS, OutputLengths
from moonpool.types import BlockKey


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "little"))


def test_the_first_prediction_is_a_guess() -> None:
    assert OutputLengths().predict(1000, [key(1)], 1) == FIRST_GUESS_TOKENS


def test_prompts_of_one_length_get_answers_of_one_length() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn(1000, [], 20, 0.0)
        lengths.learn(20_000, [], 900, 0.0)
    assert lengths.predict(1010, [], 0) == pytest.approx(20.0)
    assert lengths.predict(20_100, [], 0) == pytest.approx(900.0)
    assert lengths.predict(5, [], 0) == pytest.approx(lengths.mean.value), "never seen: the mean"


def test_the_next_turn_resembles_the_last() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn(1000, [key(99)], 100, 0.0)
    lengths.learn(1000, [key(1), key(2)], 500, 0.0)
    usual = lengths.predict(1000, [key(7)], 0)
    turn = [key(1), key(2), key(3), key(4)]  # the former prompt, its answer, and a new question
    assert lengths.predict(1000, turn, 3) == pytest.approx((usual + 500) / 2)
    assert lengths.predict(1000, turn, 1) == usual, "only what is shared is looked at"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "MAX_PREFIXES", 3)
    lengths = OutputLengths()
    for name in range(10):
        lengths.learn(1000, [key(name)], 1000 * (name + 1), 0.0)
        lengths.learn(1000, [key(0)], 7, 0.0)
    usual = lengths.predict(1000, [key(0)], 0)
    known = [name for name in range(10) if lengths.predict(1000, [key(name)], 1) != usual]
    assert known == [0, 8, 9], "the last ones, and the one in use"


def test_the_error_has_a_sign() -> None:
    lengths = OutputLengths()
    lengths.learn(1000, [], 100, 150.0)
    lengths.learn(1000, [], 100, 30.0)
    assert lengths.error.mean == pytest.approx(-10.0)
    assert lengths.error.mean_absolute == pytest.approx(60.0)
