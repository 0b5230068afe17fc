"""Finds which of several clusters at the same price bears the most load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from moonpool.plan.candidate import Candidate
from moonpool.plan.trial import Outcome, main_cause
from moonpool.types import Struct

SPEEDS = (1.1, 1.25, 1.5, 2.0, 3.0)
"""The multiples of the trace's speed to try, one after the other."""
FasterLook = Callable[[Sequence[Candidate], float, float | None], list[Outcome]]
"""Simulates clusters at a multiple of the trace's speed. The last argument is the multiple that is
tried next."""


class Room(Struct, frozen=True):
    """The load that a cluster bears. It keeps the SLOs at `kept` times the trace's speed, and
    misses them at `missed` times that speed, mostly because it lacks `lacked`. `missed` is None if
    no simulated speed missed them."""

    candidate: Candidate
    kept: float
    missed: float | None
    lacked: str = ""


def rooms(contenders: Sequence[Candidate], look: FasterLook, wanted: float) -> list[Room]:
    """Returns the contenders with their room, the largest room first; equal contenders keep their
    order. All contenders keep the SLOs at the trace's speed."""
    found: list[Room] = []
    left, kept = list(contenders), 1.0
    for speed, after in zip_longest(SPEEDS, SPEEDS[1:]):
        outcomes = look(left, speed, after)
        holds = [outcome.share >= wanted for outcome in outcomes]
        lost = [
            Room(one, kept, speed, main_cause(outcome.misses))
            for one, outcome in zip(left, outcomes, strict=True)
            if outcome.share < wanted
        ]
        found = [*lost, *found]
        left = [one for one, held in zip(left, holds, strict=True) if held]
        if not left:
            return found
        kept = speed
    return [*(Room(one, kept, None) for one in left), *found]
