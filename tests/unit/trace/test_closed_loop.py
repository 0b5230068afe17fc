"""Tests that a call starts when all calls for which it waits have ended, and only then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.trace.closed_loop import MAX_TRIES, ClosedLoop, retry_after_s
from moonpool.trace.row import TraceRow


def call(number: int, after: tuple[int, ...]) -> TraceRow:
    names = tuple(str(one) for one in after)
    return TraceRow(0.0, 1, 1, session="s", call=str(number), after=names)


@st.composite
def graphs(draw: st.DrawFn) -> list[TraceRow]:
    size = draw(st.integers(1, 12))
    return [
        call(n, tuple(draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else ()))
        for n in range(size)
    ]


@given(graphs(), st.randoms(use_true_random=False), st.sets(st.integers(0, 11)))
def test_every_call_starts_once_or_is_given_up(calls, rng, failing) -> None:
    loop: ClosedLoop[TraceRow] = ClosedLoop()
    running = [one for one in calls if loop.add(one) is not None]
    ended: set[str] = set()
    started = [one.call for one in running]
    while running:
        one = running.pop(rng.randrange(len(running)))
        if int(one.call) in failing:
            loop.give_up(one.call)
            continue
        ended.add(one.call)
        for following in loop.end(one.call):
            assert ended >= set(following.after)
            started.append(following.call)
            running.append(following)
    assert len(started) == len(set(started))
    assert len(started) + loop.num_dropped == len(calls)
    assert loop.num_waiting == 0


def test_what_waits_for_a_call_that_failed_before_it_was_read_never_starts() -> None:
    loop: ClosedLoop[TraceRow] = ClosedLoop()
    assert loop.add(call(0, ())) == 0.0 and not loop.drops(call(0, ()))
    loop.give_up("0")
    assert loop.drops(call(1, (0,))) and loop.drops(call(2, (1,)))
    assert not loop.drops(call(3, ()))


def test_tools_run_also_before_a_call_that_is_read_after_the_calls_that_it_waits_for() -> None:
    loop: ClosedLoop[TraceRow] = ClosedLoop()
    assert loop.add(call(0, ())) == 0.0
    assert not list(loop.end("0"))
    late = TraceRow(0.0, 1, 1, session="s", call="1", after=("0",), delay_s=60.0)
    assert loop.add(late) == 60.0 and not loop.num_waiting


def test_clients_follow_retry_after_and_give_up_at_last() -> None:
    assert retry_after_s(429, 1, 7.5) == 7.5
    assert retry_after_s(429, 1, 500.0) == 60.0
    assert [retry_after_s(503, n, None) for n in (1, 2, 9)] == [0.5, 1.0, 8.0]
    assert retry_after_s(422, 1, 1.0) is None
    assert retry_after_s(429, MAX_TRIES, 1.0) is None
