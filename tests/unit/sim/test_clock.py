"""Tests the clock: a total order, cancelled events, and heaps that do not fill with cancelled
entries."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.sim.clock import MIN_HEAP_TO_COMPACT, Clock, Priority


def test_priority_decides_at_one_instant_whatever_was_scheduled_first() -> None:
    clock = Clock()
    ran: list[Priority] = []
    for priority in reversed(Priority):
        clock.at(1.0, priority, ran.append, priority)
    clock.run()
    assert ran == list(Priority) and len(ran) > 3


def test_sequence_decides_among_equal_priorities() -> None:
    clock = Clock()
    ran: list[int] = []
    for number in range(100):
        clock.at(1.0, Priority.MESSAGE, ran.append, number)
    clock.run()
    assert ran == list(range(100))


def test_time_decides_before_priority() -> None:
    clock = Clock()
    ran: list[str] = []
    clock.at(2.0, Priority.FAULT, ran.append, "later fault")
    clock.at(1.0, Priority.TICK, ran.append, "earlier tick")
    clock.run()
    assert ran == ["earlier tick", "later fault"]


def test_what_a_callback_schedules_for_now_runs_now_by_its_priority() -> None:
    clock = Clock()
    ran: list[str] = []

    def step_end() -> None:
        ran.append("step end")
        clock.at(clock.now, Priority.TRANSFER_END, ran.append, "transfer end")
        clock.after(0.0, Priority.MESSAGE, ran.append, "message")

    clock.at(1.0, Priority.ARRIVAL, ran.append, "arrival")
    clock.at(1.0, Priority.STEP_END, step_end)
    clock.run()
    assert ran == ["step end", "transfer end", "message", "arrival"]


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.0 + 2**-52]), st.sampled_from(list(Priority)))
    ),
    st.lists(st.integers(min_value=0, max_value=50)),
)
def test_order_is_that_of_a_sort(
    events: list[tuple[float, Priority]], cancelled: list[int]
) -> None:
    clock = Clock()
    ran: list[tuple[float, Priority, int]] = []
    keys = [(time_s, priority, number) for number, (time_s, priority) in enumerate(events)]
    timers = [clock.at(key[0], key[1], ran.append, key) for key in keys]
    gone = {number for number in cancelled if number < len(timers)}
    for number in cancelled:
        if number < len(timers):
            timers[number].cancel()
    clock.run()
    assert ran == sorted(key for key in keys if key[2] not in gone)


@pytest.mark.parametrize("time_s", [nan, inf, -inf, 0.999])
def test_neither_the_past_nor_what_is_no_time(time_s: float) -> None:
    clock = Clock(1.0)
    with pytest.raises(ValueError, match="cannot schedule"):
        clock.at(time_s, Priority.TICK, print)
    with pytest.raises(ValueError, match="cannot run"):
        clock.run(time_s)
    assert len(clock) == 0 and clock.now == 1.0


@pytest.mark.parametrize("delay_s", [nan, -1e-9, inf])
def test_no_such_delay(delay_s: float) -> None:
    with pytest.raises(ValueError, match="cannot schedule"):
        Clock().after(delay_s, Priority.TICK, print)


def test_no_such_start() -> None:
    with pytest.raises(ValueError, match="cannot start"):
        Clock(nan)


def test_time_never_goes_backwards() -> None:
    clock = Clock()
    clock.at(1.0, Priority.TICK, lambda: None)
    clock.now = 2.0  # a change that no caller may make
    with pytest.raises(AssertionError, match="backwards"):
        clock.run()


def test_run_until_takes_what_is_due_then_and_stands_there() -> None:
    clock = Clock()
    ran: list[float] = []
    for time_s in (1.0, 2.0, 2.5):
        clock.at(time_s, Priority.TICK, ran.append, time_s)
    clock.run(until=2.0)
    assert (ran, clock.now, len(clock)) == ([1.0, 2.0], 2.0, 1)
    clock.run(until=2.25)
    assert (ran, clock.now) == ([1.0, 2.0], 2.25)
    clock.run()
    assert (ran, clock.now, clock.num_run) == ([1.0, 2.0, 2.5], 2.5, 3)


def test_step_is_one_callback_and_passes_over_tombstones() -> None:
    clock = Clock()
    ran: list[int] = []
    timers = [clock.at(1.0, Priority.TICK, ran.append, number) for number in range(3)]
    timers[0].cancel()
    assert clock.step() and ran == [1]
    timers[2].cancel()
    assert not clock.step() and ran == [1] and len(clock) == 0


def test_cancelling_twice_or_too_late_is_nothing() -> None:
    clock = Clock()
    ran: list[int] = []
    timers = [clock.at(float(number), Priority.TICK, ran.append, number) for number in range(3)]
    timers[1].cancel()
    timers[1].cancel()
    assert [timer.waiting for timer in timers] == [True, False, True] and len(clock) == 2
    clock.run(until=1.0)
    timers[0].cancel()
    assert len(clock) == 1
    clock.run()
    assert ran == [0, 2] and not timers[2].waiting


def test_a_callback_may_cancel_its_own_timer() -> None:
    clock = Clock()
    timer = clock.at(1.0, Priority.TICK, lambda: timer.cancel())
    clock.at(2.0, Priority.TICK, lambda: None)
    clock.run(until=1.0)
    assert len(clock) == 1


def test_tombstones_are_never_most_of_the_heap() -> None:
    clock = Clock()
    ran: list[int] = []
    kept = [clock.at(1e9 + n, Priority.TICK, ran.append, n) for n in range(100, 0, -1)]
    for number in range(10_000):
        clock.at(2e9 + number, Priority.TICK, ran.append, -1).cancel()
        assert clock.heap_size <= 2 * max(len(clock), MIN_HEAP_TO_COMPACT)
        assert len(clock) == len(kept)
    clock.run()
    assert ran == list(range(1, 101))


def test_compaction_from_within_a_callback_loses_nothing() -> None:
    clock = Clock()
    ran: list[int] = []
    doomed = [clock.at(5.0, Priority.TICK, ran.append, -1) for _ in range(200)]
    for number in range(90):
        clock.at(3.0 + number, Priority.TICK, ran.append, number)

    def cancel_all() -> None:
        for timer in doomed:
            timer.cancel()

    clock.at(1.0, Priority.TICK, cancel_all)
    clock.run()
    assert ran == list(range(90)) and clock.heap_size == len(clock) == 0


def test_an_exception_propagates_and_the_clock_can_run_on() -> None:
    clock = Clock()
    ran: list[int] = []
    clock.at(1.0, Priority.TICK, [].pop)
    clock.at(1.0, Priority.TICK, ran.append, 1)
    with pytest.raises(IndexError):
        clock.run()
    clock.run()
    assert ran == [1] and clock.now == 1.0
