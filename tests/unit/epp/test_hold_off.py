"""An endpoint that comes and goes is left alone, for longer each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.epp.hold_off import HOLD_OFFS, WINDOW_S, HoldOff


def test_a_restart_costs_nothing() -> None:
    held = HoldOff()
    assert held.until_s("e", 0.0) <= 0.0
    held.note_left("e", 10.0)
    assert held.until_s("e", 10.0) <= 10.0


def test_each_further_departure_doubles_the_time() -> None:
    held = HoldOff()
    times = []
    for number in range(8):
        held.note_left("e", float(number))
        times.append(held.until_s("e", float(number)) - number)
    assert times == [0, 5, 10, 20, 40, 80, 120, 120]
    assert held.until_s("other", 8.0) <= 8.0


def test_what_is_long_ago_is_forgotten() -> None:
    held = HoldOff()
    for number in range(6):
        held.note_left("e", float(number))
    assert held.until_s("e", 5.0) > 5.0
    assert held.until_s("e", 6.0 + WINDOW_S) <= 6.0 + WINDOW_S


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=40))
def test_the_time_is_bounded(departures: list[tuple[str, float]]) -> None:
    held, now = HoldOff(), 0.0
    for name, later_s in departures:
        now += later_s
        held.note_left(name, now)
        for each in "abc":
            assert held.until_s(each, now) - now <= HOLD_OFFS.delays_s[-1] * (1 + 1e-9)
