"""Tests requests that wait for a lost instance or for room, in order and until their deadlines."""

from __future__ import annotations

import pickle

import pytest
from conductor_desk import Desk, of, sent
from msgspec.structs import replace

from moonpool.conductor.actions import (
    ConductorAction,
    DrainRequested,
    InstanceLost,
    Refuse,
    RequestCancelled,
    Tick,
)
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting import queue as waiting_module
from moonpool.conductor.waiting.queue import Deadlines
from moonpool.protocol.messages import AttemptFailed, AttemptId, ReserveDecode, StartPrefill
from moonpool.types import FinishReason, InstanceId, RequestId


def lose(desk: Desk, name: str) -> list[ConductorAction]:
    return desk.handle(InstanceLost(InstanceId(name), "it died"))


def tick(desk: Desk, later_s: float = 0.1) -> list[ConductorAction]:
    desk.now += later_s
    return desk.handle(Tick())


def placed(actions: list[ConductorAction]) -> list[str]:
    return [start.attempt.attempt_id.split("/")[0] for _, start in sent(actions, StartPrefill)]


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_new_and_running_requests_wait_for_the_only_instance_of_a_role(name: str) -> None:
    desk = Desk("p0", "d0")
    desk.ask("a")
    desk.decoding("a/1")
    desk.tokens("d0", 51, 52, work="a/1")
    desk.ask("b")
    actions = [*lose(desk, name), *desk.ask("c"), *tick(desk, 50.0)]
    assert not of(actions, Refuse)
    actions = desk.join(name, incarnation=2)
    assert placed(actions) == (["b", "c"] if name == "p0" else ["a", "b", "c"])
    if name == "d0":
        (again,) = (start for _, start in sent(actions, StartPrefill)[:1])
        assert tuple(again.attempt.token_ids[-3:]) == (50, 51, 52), "the answer goes on"
    assert desk.conductor.num_waiting == 0


def test_waiting_requests_end_at_their_deadlines_or_with_their_clients() -> None:
    desk = Desk("p0", "d0")
    lose(desk, "d0")
    desk.ask("late", deadline_s=5.0)
    desk.ask("gone")
    desk.handle(RequestCancelled(RequestId("gone")))
    (refuse,) = of(tick(desk, 6.0), Refuse)
    assert (refuse.request_id, refuse.refusal.status) == ("late", 504)
    assert desk.conductor.num_waiting == 0
    assert not placed(desk.join("d0", incarnation=2))


def test_nobody_waits_for_an_instance_that_never_was_or_that_left() -> None:
    desk = Desk("p0")
    assert of(desk.ask("a"), Refuse)[0].refusal.reason == "no_decode_instance"
    desk.join("d0")
    desk.handle(DrainRequested(InstanceId("d0"), 0.0, "its process got a signal"))
    lose(desk, "d0")
    assert of(desk.ask("b"), Refuse)[0].refusal.reason == "no_decode_instance"


def test_ended_requests_are_not_remembered_until_their_levels_are_missed() -> None:
    desk = Desk("p0", "d0")
    desk.ask("a", ttft_s=1e9, deadline_s=1e9)
    (known,) = desk.conductor.requests.values()
    under_way: dict[RequestId, TrackedRequest] = {}
    deadlines = Deadlines(under_way)
    for number in range(1000):
        name = RequestId(f"r{number}")
        tracked = TrackedRequest(replace(known.request, request_id=name), known.record)
        under_way[name] = tracked
        deadlines.add(tracked)
        deadlines.add_joining(tracked)
        del under_way[name]
        deadlines.trim()
    assert len(pickle.dumps(deadlines)) < 5000


def test_waiting_new_requests_are_bounded_and_begun_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_module, "MAX_WAITING", 2)
    desk = Desk("p0", "d0")
    for name in ("a", "b", "c"):
        desk.ask(name)
    lose(desk, "d0")
    assert desk.conductor.num_waiting == 3
    assert of(desk.ask("new"), Refuse)[0].refusal.status == 503


def test_a_begun_answer_waits_for_room() -> None:
    desk = Desk("p0", "d0", "d1", num_blocks=8)
    desk.ask("a", token_ids=range(16), max_tokens=9)
    first = desk.conductor.requests[RequestId("a")].attempt
    assert first is not None
    lost, left = first.decoder, "d1" if first.decoder == "d0" else "d0"
    desk.ask("b", token_ids=range(100, 116), max_tokens=9)
    assert not of(lose(desk, lost), Refuse)
    assert desk.conductor.num_waiting == 1
    late = desk.ask("new", token_ids=range(16), max_tokens=9, ttft_s=0.02)
    assert of(late, Refuse), "it is not begun"
    assert not placed(tick(desk))
    actions = desk.handle(RequestCancelled(RequestId("b")))
    assert placed(actions) == ["a"]
    assert [name for name, _ in sent(actions, ReserveDecode)] == [left]


def test_a_request_waits_for_the_lost_instance_that_alone_is_large_enough() -> None:
    desk = Desk("p0")
    desk.num_blocks = 2
    desk.join("d0")
    desk.num_blocks = 1000
    desk.join("d1")
    assert [name for name, _ in sent(desk.ask("begun"), ReserveDecode)] == ["d1"]
    assert not of(lose(desk, "d1"), Refuse)
    (refuse,) = of(desk.ask("new"), Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (422, "no_decode_capacity")
    assert not of(tick(desk, 50.0), Refuse)
    assert placed(desk.join("d1", incarnation=2)) == ["begun"]


def test_repeated_faults_are_retried_after_a_while_and_tokens_forgive_them() -> None:
    desk = Desk("m0", max_attempts=3)
    desk.ask("a", max_tokens=50)
    number = 1
    for _ in range(6):  # each attempt delivers a token before its fault
        desk.tokens("m0", 7, work=f"a/{number}")
        failed = AttemptFailed(AttemptId(f"a/{number}"), "blocks_lost", "gone")
        assert placed(desk.report("m0", failed)) == ["a"]
        number += 1
    failed = AttemptFailed(AttemptId(f"a/{number}"), "blocks_lost", "gone")
    assert not placed(desk.report("m0", failed)), "a second fault in a row waits a moment"
    assert placed(tick(desk, 2.0)) == ["a"]
    number += 1
    failed = AttemptFailed(AttemptId(f"a/{number}"), "blocks_lost", "gone")
    assert of(desk.report("m0", failed), Refuse)[0].refusal.reason == "blocks_lost"
    desk.assert_nothing_is_booked()


def test_a_flood_that_waits_is_placed_in_order_over_several_turns() -> None:
    desk = Desk("p0", "d0", num_blocks=100_000)
    lose(desk, "d0")
    names = [f"r{number}" for number in range(300)]
    for name in names:
        desk.ask(name)
    found = placed(desk.join("d0", incarnation=2))
    assert 0 < len(found) < 300
    assert found + placed(tick(desk)) == names


def test_finished_requests_do_not_wait() -> None:
    desk = Desk("p0", "d0")
    desk.ask("a")
    desk.decoding("a/1")
    desk.tokens("d0", 51, finish=FinishReason.STOP, work="a/1")
    lose(desk, "d0")
    assert desk.conductor.num_waiting == 0


def test_waiting_requests_are_placed_by_priority_and_late_ones_first() -> None:
    desk = Desk("p0", "d0")
    lose(desk, "d0")
    desk.ask("late", priority=9, deadline_s=40.0)
    desk.ask("usual", deadline_s=600.0)
    desk.ask("urgent", priority=-4, deadline_s=600.0)
    desk.ask("patient", priority=9, deadline_s=600.0)
    tick(desk, 21.0)
    assert placed(desk.join("d0", incarnation=2)) == ["late", "urgent", "usual", "patient"]


def test_an_attempt_knows_its_priority_and_its_tenants_share() -> None:
    desk = Desk("p0", "d0", weights={"big": 2.5})
    actions = desk.ask("a", priority=3, tenant="big/salt")
    ((_, start),) = sent(actions, StartPrefill)
    assert (start.attempt.priority, start.attempt.share) == (3, 2.5)
