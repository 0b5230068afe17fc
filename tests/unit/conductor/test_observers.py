"""Tests the list of observers: which observers get which event, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.conductor.actions import Announce, ConductorAction
from moonpool.conductor.observers import ClusterObserver, Observers

EVENTS = {name for name in vars(ClusterObserver) if not name.startswith("_")}


class Ticking(ClusterObserver):
    def __init__(self, name: str) -> None:
        self.name = name

    def tick(self, now: float) -> Iterable[ConductorAction]:
        yield Announce(f"{self.name} {now:g}")


class Silent(ClusterObserver):
    pass


class Validating(Ticking):
    def validate(self) -> None:
        raise AssertionError(self.name)


def test_all_hear_in_the_order_of_the_list() -> None:
    observers = Observers([Ticking("a"), Silent(), Validating("b"), Ticking("c")])
    told = [action for tick in observers.tick for action in tick(2.0)]
    assert told == [Announce("a 2"), Announce("b 2"), Announce("c 2")]


def test_who_does_not_override_an_event_costs_nothing() -> None:
    observers = Observers([Silent(), Ticking("a"), Validating("b")])
    lists = {name: getattr(observers, name) for name in EVENTS}
    assert {name: len(found) for name, found in lists.items() if found} == {
        "tick": 2,
        "validate": 1,
    }


def test_there_is_a_list_for_each_event() -> None:
    assert vars(Observers([])).keys() == EVENTS
