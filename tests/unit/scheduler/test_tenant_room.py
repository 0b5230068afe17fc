"""Tests that the tenant that was served most gives way if blocks run out or a batch is full."""

from __future__ import annotations

from typing import Any

import pytest
from test_instance import Bench, attempt, of, reported, start

from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    DecodeAccepted,
    ReserveDecode,
)
from moonpool.protocol.transfer_events import ReceiveEnded
from moonpool.scheduler.actions import ExpectStream, WorkerAction
from moonpool.scheduler.batching import queue_order
from moonpool.types import Role, Slo


def reserve(bench: Bench, name: str, first: int, **known: Any) -> list[WorkerAction]:
    return bench.handle(ReserveDecode(attempt=attempt(name, first=first, **known)))


def decode(bench: Bench, name: str, first: int, **known: Any) -> list[WorkerAction]:
    """Begins a decode with 10 prompt tokens, in blocks of 4."""
    assert of(reserve(bench, name, first, **known), ExpectStream)
    bench.handle(ReceiveEnded(stream_id=name))
    return bench.handle(start(name))


def test_a_reservation_waits_for_blocks_that_the_step_under_way_will_free() -> None:
    bench = Bench(Role.DECODE, num_blocks=4)
    decode(bench, "a", 100)
    bench.handle(Abort(attempt_id=AttemptId("a")))
    actions = reserve(bench, "b", 500)
    assert not reported(actions, AttemptFailed) and not of(actions, ExpectStream)
    (expected,) = of(bench.end_step(), ExpectStream)
    assert expected.stream_id == "b"
    bench.handle(ReceiveEnded(stream_id="b"))
    assert reported(bench.handle(start("b")), DecodeAccepted)


def test_a_reservation_that_nothing_will_help_fails_at_once() -> None:
    bench = Bench(Role.DECODE, num_blocks=4)
    decode(bench, "a", 100)
    (failed,) = reported(reserve(bench, "b", 500), AttemptFailed)
    assert failed.reason == "no_blocks"


def test_a_reservation_that_waits_may_be_aborted() -> None:
    bench = Bench(Role.DECODE, num_blocks=4)
    decode(bench, "a", 100)
    bench.handle(Abort(attempt_id=AttemptId("a")))
    reserve(bench, "b", 500)
    bench.handle(Abort(attempt_id=AttemptId("b")))
    bench.end_step()
    bench.assert_empty()


def test_answers_of_a_tenant_that_was_served_far_more_make_room() -> None:
    """The answers make room at the end of the step under way, and continue later."""
    bench = Bench(Role.DECODE, num_blocks=24)
    for name, first in (("a", 100), ("c", 900)):
        decode(bench, name, first, tenant="flood")
    while bench.instance.pool.num_available:
        bench.end_step()
    assert not reported(reserve(bench, "b", 500, tenant="small"), AttemptFailed)
    (expected,) = of(bench.end_step(), ExpectStream)
    assert expected.stream_id == "b"
    assert bench.instance.counters["preemptions"] == 1
    bench.handle(ReceiveEnded(stream_id="b"))
    bench.handle(start("b"))
    bench.end_step()
    assert bench.lengths() == {"a": 1, "b": 1}, "the youngest one gave way"
    for name in ("a", "b"):
        bench.handle(Abort(attempt_id=AttemptId(name)))
    bench.end_step()
    assert set(bench.lengths()) == {"c"}, "it goes on"


def test_a_tenant_served_about_as_much_makes_no_room() -> None:
    """Without this rule, two tenants would take the room from each other in turn."""
    bench = Bench(Role.DECODE, num_blocks=4)
    decode(bench, "a", 100, tenant="one")
    assert reported(reserve(bench, "b", 500, tenant="two"), AttemptFailed)


@pytest.mark.parametrize("was_here", [False, True])
def test_a_tenant_makes_room_by_no_more_than_its_credit(
    was_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that was away must not take more room than a tenant that has requests here."""
    monkeypatch.setattr(queue_order, "CREDIT_TOKENS", 4)
    bench = Bench(Role.DECODE, num_blocks=24)
    if was_here:
        decode(bench, "before", 500, tenant="small")
        bench.handle(Abort(attempt_id=AttemptId("before")))
        bench.end_step()
    for name, first in (("a", 100), ("c", 900)):
        decode(bench, name, first, tenant="flood")
    while bench.instance.pool.num_available:
        bench.end_step()
    (failed,) = reported(reserve(bench, "b", 1300, tenant="small"), AttemptFailed)
    assert failed.reason == "no_blocks"


def test_the_tenant_that_was_served_most_is_preempted_where_answers_outgrow_the_room() -> None:
    """The youngest answer must stay, because it belongs to the other tenant."""
    bench = Bench(Role.DECODE, num_blocks=9)
    decode(bench, "a", 100, tenant="flood")
    for _ in range(9):
        bench.end_step()
    decode(bench, "b", 500, tenant="small")
    while not bench.instance.counters.get("preemptions"):
        bench.end_step()
    assert set(bench.lengths()) == {"b"}


def test_a_joining_answer_of_a_tenant_served_less_goes_first() -> None:
    bench = Bench(Role.DECODE)
    slo = Slo(ttft_s=1.0, tbt_s=0.015)
    for name, first, tenant in (("a", 100, "flood"), ("b", 500, "flood"), ("c", 900, "small")):
        decode(bench, name, first, tenant=tenant, slo=slo, max_step_s=0.02)
    accepted = reported(bench.end_step(), DecodeAccepted)
    assert [report.attempt_id for report in accepted] == ["c"]


def test_a_full_batch_takes_the_tenant_served_less_first() -> None:
    """Two of the three answers fit into a step."""
    bench = Bench(Role.DECODE, max_sequences=2)
    for name, first, tenant in (("a", 100, "flood"), ("b", 500, "flood"), ("c", 900, "small")):
        decode(bench, name, first, tenant=tenant)
    for _ in range(8):
        bench.end_step()
        assert "c" in bench.lengths()
