"""Tests the choice among clusters of the same price by the load that they bear."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.plan.candidate import Candidate, NodeKind
from moonpool.plan.room import SPEEDS, FasterLook, Room, rooms
from moonpool.plan.trial import Outcome
from tests.unit.plan.made_up import outcome

NODE = NodeKind("A800-SXM", 8)
PAIR = Candidate(NODE, NODE, 1, 1, 0, 64_000, 512)
MIXED = Candidate(NODE, NODE, 0, 0, 2, 64_000, 512)


def keeps(until: dict[Candidate, float], asked: list[float]) -> FasterLook:
    """Returns a simulation by which each cluster keeps the SLOs up to its speed."""

    def look(candidates: Sequence[Candidate], speed: float, after: float | None) -> list[Outcome]:
        asked.append(speed)
        return [outcome(until[one] / speed, 1.0) for one in candidates]

    return look


def test_the_one_that_bears_more_comes_first() -> None:
    found = rooms([MIXED, PAIR], keeps({MIXED: 1.2, PAIR: 1.5}, []), 0.99)
    assert found == [
        Room(PAIR, 1.5, 2.0, "prefill time"),
        Room(MIXED, 1.1, 1.25, "prefill time"),
    ]


def test_of_equal_ones_the_first_stays() -> None:
    found = rooms([MIXED, PAIR], keeps({MIXED: 1.3, PAIR: 1.4}, []), 0.99)
    assert [room.candidate for room in found] == [MIXED, PAIR]


def test_nothing_is_simulated_after_the_last_has_failed() -> None:
    asked: list[float] = []
    found = rooms([PAIR], keeps({PAIR: 1.0}, asked), 0.99)
    assert found == [Room(PAIR, 1.0, SPEEDS[0], "prefill time")]
    assert asked == [SPEEDS[0]]


def test_one_that_keeps_all_speeds_has_no_known_limit() -> None:
    found = rooms([PAIR], keeps({PAIR: 9.0}, []), 0.99)
    assert found == [Room(PAIR, SPEEDS[-1], None)]
