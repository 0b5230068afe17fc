"""Tests that instances that still learn from their first prefills are checked only when there is a
reason."""

from __future__ import annotations

from math import inf
from random import Random

from conductor_desk import Desk

from moonpool.conductor.forecast.beginners import Beginners
from moonpool.conductor.instance_table import NEVER_S
from moonpool.conductor.state import InstanceState
from moonpool.types import InstanceId

NAMES = ("p0", "p1", "p2", "p3")


def states() -> list[InstanceState]:
    desk = Desk(*NAMES, "d0")
    return [desk.conductor.instances[InstanceId(name)] for name in NAMES]


class Scanned:
    """A model of `Beginners` that checks every instance each time."""

    def __init__(self) -> None:
        self.until_s: dict[InstanceId, float] = {}

    def due(self, name: InstanceId, now: float) -> bool:
        return self.until_s.get(name, inf) <= now


def test_it_yields_what_a_look_at_every_instance_yields() -> None:
    """Instances are also woken during a pass; those after the present one must still have their
    turn in it."""
    rng, all_states = Random(7), states()
    beginners, scanned = Beginners(), Scanned()
    num_seen = 0
    for now in range(2000):
        one = rng.choice(all_states)
        name = one.info.instance_id
        action = rng.randrange(4)
        if action == 0:
            beginners.enter(one)
            scanned.until_s[name] = NEVER_S
        elif action == 1:
            beginners.wake(one)
            if name in scanned.until_s:
                scanned.until_s[name] = NEVER_S
        elif action == 2 and not rng.randrange(8):
            beginners.leave(name)
            scanned.until_s.pop(name, None)
        turns = iter(list(scanned.until_s))
        for state in beginners.due(now):
            num_seen += 1
            seen = state.info.instance_id
            assert seen == next(each for each in turns if scanned.due(each, now))
            what = rng.randrange(4)
            if what == 0:
                beginners.leave(seen)
                del scanned.until_s[seen]
            elif what < 3:
                until_s = rng.choice((now + 0.5, now + 3.0, inf))
                beginners.sleep(state, until_s)
                scanned.until_s[seen] = until_s
            other = rng.choice(all_states)
            if other.info.instance_id in scanned.until_s and other is not state:
                beginners.wake(other)
                scanned.until_s[other.info.instance_id] = NEVER_S
        assert not any(scanned.due(each, now) for each in turns)
    assert num_seen > 1000


def test_an_earlier_incarnation_wakes_nobody() -> None:
    old, new = states()[0], states()[0]
    beginners = Beginners()
    beginners.enter(old)
    beginners.enter(new)
    beginners.sleep(next(beginners.due(0.0)), inf)
    beginners.wake(old)
    assert not list(beginners.due(1.0))
    beginners.wake(new)
    assert list(beginners.due(1.0)) == [new]
