"""Tests means of lengths while most answers are still under way, and as old answers fade."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS
from moonpool.conductor.roles.running_lengths import LengthRange, RunningLengths, kind_of

CHAT, DOCUMENT = kind_of(300, 0), kind_of(20_000, 0)
TOKENS_PER_S = 25


def after(
    seconds: int, lengths: dict[int, Callable[[random.Random], int]], seed: int = 0
) -> RunningLengths:
    """Plays two requests of each kind a second, and reads the means every 2 s."""
    learned, rng = RunningLengths(), random.Random(seed)
    under_way: list[list[int]] = []  # each entry is [kind, tokens so far, final number of tokens]
    for second in range(seconds):
        for each in under_way:
            each[1] += TOKENS_PER_S
        for kind, _, length in (each for each in under_way if each[1] >= each[2]):
            learned.note_answer(kind, length)
        under_way = [each for each in under_way if each[1] < each[2]]
        under_way += [[kind, 0, draw(rng)] for kind, draw in lengths.items() for _ in range(2)]
        if second % 2:
            learned.look((kind, so_far) for kind, so_far, _ in under_way if so_far)
    return learned


def test_nothing_known_is_the_first_guess_within_limits() -> None:
    least, mean, most = RunningLengths().of(CHAT)
    assert least < mean == FIRST_GUESS_TOKENS < most


def test_answers_under_way_show_that_a_kind_has_long_ones() -> None:
    """The few answers that have ended have 100 tokens; nine in ten have 3,000."""
    found = after(30, {CHAT: lambda rng: 3000 if rng.random() < 0.9 else 100})
    least, mean, most = found.of(CHAT)
    assert 400 < least < mean < most and mean > 1000
    assert found.of(DOCUMENT) == found.of(CHAT), "all kinds stand in for an unknown one"


def test_kinds_are_apart() -> None:
    found = after(40, {CHAT: lambda _: 2000, DOCUMENT: lambda _: 200})
    assert found.of(DOCUMENT) == pytest.approx(LengthRange(200.0, 200.0, 200.0))
    assert found.of(CHAT).mean > 1000


@pytest.mark.parametrize("mean", [80, 900])
def test_in_the_long_run_the_mean_is_right_and_sure(mean: int) -> None:
    found = after(900, {CHAT: lambda rng: 1 + int(rng.expovariate(1 / mean))})
    least, middle, most = found.of(CHAT)
    assert middle == pytest.approx(mean, rel=0.15)
    assert most - least < 0.1 * mean


def test_old_answers_fade() -> None:
    lengths = RunningLengths()
    for length, count in ((100, 600), (900, 2500)):
        for number in range(count):
            lengths.note_answer(CHAT, length)
            if number % 10 == 0:
                lengths.look([(CHAT, length // 2)] * 20)
    assert lengths.of(CHAT).mean == pytest.approx(900, rel=0.15)
