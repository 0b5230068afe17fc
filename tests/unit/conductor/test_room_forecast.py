"""Tests the prediction of how long answers last, and of when they leave room for others."""

from __future__ import annotations

import pytest
from conductor_desk import Desk, of
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.actions import Refuse
from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS
from moonpool.conductor.waiting.room_forecast import MEMORY_ANSWERS, RecentLengths
from moonpool.types import RequestId

STEP_S = 0.01
"""The seconds of a decode step by the desk's cost, with 1 ms for each answer in the step."""


def fill(desk: Desk, number: int, max_tokens: int, ignore_eos: bool) -> None:
    """Begins `number` answers, each of which holds 80 tokens."""
    desk.conductor.output_predictor.lengths.mean.value = 64.0
    for name in map(str, range(number)):
        known = {"token_ids": tuple(range(16)), "deadline_s": 1e4}
        desk.ask(name, max_tokens=max_tokens, sampling={"ignore_eos": ignore_eos}, **known)
        desk.decoding(f"{name}/{desk.conductor.requests[RequestId(name)].attempt.attempt_id[-1]}")


def told(desk: Desk, **known: object) -> tuple[float, Refuse]:
    """Returns the wait that a refusal names."""
    (refuse,) = of(desk.ask("late", ttft_s=0.5, max_tokens=64, **known), Refuse)
    return float(refuse.refusal.message.rpartition(" in ")[2].removesuffix(" s")), refuse


@pytest.mark.parametrize("max_tokens", [1000, 7000])
def test_the_wait_is_that_of_the_answers_that_hold_the_room(max_tokens: int) -> None:
    """The wait must not include the short answer that is refused."""
    desk = Desk("p0", "d0", num_blocks=80)  # of answers of 4 tokens
    fill(desk, 4, max_tokens, ignore_eos=True)
    wait_s, refuse = told(desk)
    assert wait_s == pytest.approx((max_tokens - 1) * (STEP_S + 4e-3), rel=0.05)
    assert refuse.refusal.reason == "no_decode_capacity"
    assert refuse.refusal.retry_after_s == pytest.approx(min(wait_s, 120.0), rel=0.05)


def test_an_answer_of_unknown_length_lasts_as_long_again() -> None:
    desk = Desk("p0", "d0", num_blocks=80)
    fill(desk, 4, 100_000, ignore_eos=False)
    first, _ = told(desk)
    assert first == pytest.approx(FIRST_GUESS_TOKENS * (STEP_S + 4e-3), rel=0.05)
    for name in map(str, range(4)):
        desk.tokens("d0", *range(50, 1049), work=desk.conductor.requests[name].attempt.attempt_id)
    desk.now = 10.0
    later, _ = told(desk)
    assert later == pytest.approx(1000 * (STEP_S + 4e-3), rel=0.05)


def test_answers_that_ended_tell_how_long_others_last() -> None:
    lengths = RecentLengths()
    for number in range(100):
        lengths.note(number + 1)
    assert lengths.left(0, 0.0) == 1 and lengths.left(0, 0.5) == 51
    assert lengths.left(50, 0.0) == 1 and lengths.left(50, 0.5) == 26
    assert lengths.left(97, 0.5) == FIRST_GUESS_TOKENS - 97, "too few were longer"
    assert lengths.left(5000, 0.5) == 5000


@given(st.lists(st.integers(1, 5000), max_size=3 * MEMORY_ANSWERS), st.integers(0, 6000))
def test_only_recent_answers_count(ended: list[int], num_tokens: int) -> None:
    lengths = RecentLengths()
    for one in ended:
        lengths.note(one)
    recent = ended[-MEMORY_ANSWERS:]
    longer = sorted(one - num_tokens for one in recent if one > num_tokens)
    for share in (0.0, 0.3, 0.99):
        left = lengths.left(num_tokens, share)
        if len(longer) >= 4:
            assert left == longer[int(share * len(longer))]
        else:
            assert left == max(num_tokens, FIRST_GUESS_TOKENS - num_tokens)
