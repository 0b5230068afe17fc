"""Tests how much of a response was observed if a call has several answers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.discovery.endpoint import Endpoint
from moonpool.epp.picker import Picked
from moonpool.epp.routed_call import Route
from moonpool.types import FinishReason


class Call:
    def __init__(self) -> None:
        self.num_tokens, self.ended, self.failed = 0, False, 0

    def note(self, num_tokens: int, finish: FinishReason | None = None) -> None:
        assert num_tokens or finish
        self.num_tokens += num_tokens
        self.ended |= finish is not None

    def fail(self, message: str, status: int) -> None:
        self.failed = status


class Answer:
    def __init__(self) -> None:
        self.call, self.is_over = Call(), False

    def end(self) -> None:
        self.is_over = True


def picked_of(answers: list[Answer]) -> Picked:
    route = Route(Endpoint(name="e", host="10.0.0.1", port=1))
    made: Any = answers
    none: Any = None
    return Picked(none, route, made)


@given(st.integers(1, 9), st.lists(st.integers(1, 40), max_size=20))
def test_tokens_are_shared_and_none_is_lost(count: int, seen: list[int]) -> None:
    answers = [Answer() for _ in range(count)]
    picked = picked_of(answers)
    for number in seen:
        picked.note(number)
    tokens = [answer.call.num_tokens for answer in answers]
    assert sum(tokens) == sum(seen) and max(tokens) - min(tokens) <= 1
    picked.note(0, FinishReason.STOP)
    assert all(answer.call.ended for answer in answers)


def test_another_endpoint_that_responds_ends_the_booking() -> None:
    answers = [Answer(), Answer()]
    picked = picked_of(answers)
    picked.note_served("10.0.0.1:1")
    assert not any(answer.is_over or answer.call.failed for answer in answers)
    picked.note_served("10.0.0.2:1")
    assert all(answer.is_over and answer.call.failed == 502 for answer in answers)
