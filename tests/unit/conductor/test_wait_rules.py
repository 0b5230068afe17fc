"""Tests which requests wait at the Conductor instead of a refusal, for how long, and how many."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_desk import Desk, of, sent

from moonpool.conductor.actions import ConductorAction, Refuse, RequestCancelled, Tick
from moonpool.conductor.request_lifecycle import ASSUMED_TIMES
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting import queue as waiting_module
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.conductor.waiting.queue import WaitingRequests
from moonpool.cost.online import MIN_SAMPLES, STEPS_PER_SAMPLE
from moonpool.protocol.messages import AttemptId, PrefillStarted, StartPrefill
from moonpool.request_record import RequestRecord
from moonpool.rewind.snapshot import dump
from moonpool.types import FinishReason, Request, RequestId, SamplingParams, Slo

ADMISSIONS = ["none", "baseline", "early", "predictive", "goodput"]
ROOM = {"token_ids": tuple(range(16)), "max_tokens": 9}
"""Fields of a request so large that two of them do not fit together."""


def full_desk(**config: Any) -> Desk:
    desk = Desk("p0", "d0", num_blocks=8, **config)
    desk.ask("first", **ROOM)
    desk.decoding("first/1")
    return desk


def end(desk: Desk, name: str) -> list[ConductorAction]:
    return desk.handle(RequestCancelled(RequestId(name)))


def tick(desk: Desk, later_s: float) -> list[ConductorAction]:
    desk.now += later_s
    return desk.handle(Tick())


def placed(actions: list[ConductorAction]) -> list[str]:
    return [start.attempt.attempt_id.split("/")[0] for _, start in sent(actions, StartPrefill)]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_who_can_be_served_in_time_waits_for_room(admission: str) -> None:
    desk = full_desk(admission=admission)
    assert not of(desk.ask("second", **ROOM), Refuse)
    assert not of(desk.ask("third", **ROOM), Refuse)
    assert placed(end(desk, "first")) == ["second"], "in the order of their arrival"
    assert placed(end(desk, "second")) == ["third"]
    explained = desk.conductor.requests[RequestId("third")].explanation.lines()
    assert explained[0].startswith("waits: no decode instance has room for 28 more tokens")


@pytest.mark.parametrize("admission", ADMISSIONS[1:])
def test_who_cannot_is_refused_at_once_with_the_true_wait(admission: str) -> None:
    desk = full_desk(admission=admission)
    (refuse,) = of(desk.ask("second", ttft_s=0.05, **ROOM), Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (503, "no_decode_capacity")
    assert "there should be some in 0.1 s" in refuse.refusal.message


def test_without_admission_everybody_waits_for_room_as_in_a_servers_own_queue() -> None:
    desk = full_desk(admission="none")
    for number in range(50):
        assert not of(desk.ask(f"late-{number}", ttft_s=0.05, **ROOM), Refuse)
    assert not of(tick(desk, 30.0), Refuse)
    assert placed(end(desk, "first")) == ["late-0"]
    (refuse,) = of(desk.ask("huge", token_ids=tuple(range(200)), max_tokens=9), Refuse)
    assert refuse.refusal.status == 422, "for which no time makes room"


def test_a_wait_ends_with_the_slo_of_the_first_token() -> None:
    desk = full_desk()
    desk.ask("second", ttft_s=2.0, **ROOM)
    assert not of(tick(desk, 1.9), Refuse)
    (refuse,) = of(tick(desk, 0.1), Refuse)
    assert (refuse.request_id, refuse.refusal.status) == ("second", 503)
    assert desk.conductor.num_waiting == 0


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_without_a_stated_slo_nothing_is_refused_for_it(admission: str) -> None:
    """A prompt of 10,000 tokens takes 10 s, and a decode step 11 ms."""
    levels = {"ttft_s": 1.0, "tbt_s": 0.001}
    prompt = {"token_ids": tuple(range(10_000)), "deadline_s": 600.0}
    desk = Desk("p0", "d0", num_blocks=100_000, admission=admission)
    assert placed(desk.ask("a", stated=False, **levels, **prompt)) == ["a"]
    stated = Desk("p0", "d0", num_blocks=100_000, admission=admission)
    found = of(stated.ask("a", **levels, **prompt), Refuse)
    assert [refuse.refusal.status for refuse in found] == ([] if admission == "none" else [422])


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_without_a_stated_slo_a_long_queue_waits_at_the_conductor(admission: str) -> None:
    """Only the requests that start within the assumed level wait at an instance. A request that
    could not end before its deadline is refused, with the time until the queue is short enough."""
    desk = Desk("p0", "d0", num_blocks=100_000, admission=admission)
    begun: list[str] = []
    refused: list[Refuse] = []
    for number in range(40):
        prompt = tuple(range(number * 10_000, number * 10_000 + 4_000))  # 4 s
        actions = desk.ask(f"r{number}", token_ids=prompt, stated=False, deadline_s=100.0)
        begun += placed(actions)
        refused += of(actions, Refuse)
    assert begun == [f"r{number}" for number in range(8)], "28 s of prompts before the last one"
    assert desk.conductor.num_waiting == 22
    assert {(one.refusal.status, one.refusal.reason) for one in refused} == {(503, "long_queue")}
    assert [one.refusal.retry_after_s for one in refused] == pytest.approx([90.0] * 10)
    assert placed(end(desk, "r0")) == ["r8"]


def test_further_choices_of_a_call_wait_for_the_first_ones() -> None:
    """The further choices of a call wait whatever their SLO is. Further choices of another call are
    refused."""
    desk = Desk("p0", "d0", num_blocks=16)
    begun: list[str] = []
    for number in range(12):
        actions = desk.ask(f"c~{number}", call="c", ttft_s=0.1, **ROOM)
        assert not of(actions, Refuse)
        begun += placed(actions)
    assert begun == ["c~0", "c~1"]
    assert of(desk.ask("other", ttft_s=0.1, **ROOM), Refuse)
    assert not of(tick(desk, 20.0), Refuse)
    for number in range(12):
        begun += placed(end(desk, f"c~{number}"))
    assert begun == [f"c~{number}" for number in range(12)]
    desk.assert_nothing_is_booked()


def test_a_call_of_which_no_choice_runs_is_refused_as_any_other() -> None:
    desk = full_desk()
    (refuse,) = of(desk.ask("c~0", call="c", ttft_s=0.05, **ROOM), Refuse)
    assert refuse.refusal.reason == "no_decode_capacity"


def test_waiting_requests_are_tried_in_order_of_what_fits() -> None:
    """A large request must not hold up small ones, and must be placed when there is room."""
    desk = Desk("p0", "d0", num_blocks=16)
    desk.ask("a", **ROOM)
    desk.decoding("a/1")
    desk.ask("large", token_ids=tuple(range(40)), max_tokens=9)
    assert placed(desk.ask("small", **ROOM)) == ["small"]
    end(desk, "small")
    assert placed(end(desk, "a")) == ["large"]


# The number of waiting requests:


def request(name: str, tenant: str, num_tokens: int = 10) -> TrackedRequest:
    asked = Request(
        request_id=RequestId(name),
        token_ids=range(num_tokens),
        sampling=SamplingParams(),
        slo=Slo(ttft_s=1.0, tbt_s=1.0),
        arrived_s=0.0,
        deadline_s=600.0,
        tenant=tenant,
    )
    return TrackedRequest(asked, RequestRecord(asked.request_id, num_tokens, asked.slo, 0.0))


def fill(queue: WaitingRequests, tenant: str, num_tokens: int = 10) -> int:
    """Adds requests of a tenant until a request has no place; returns how many had a place."""
    number = 0
    while queue.has_place(tracked := request(f"{tenant}{number}", tenant, num_tokens)):
        queue.add(tracked, 0.0)
        number += 1
    return number


def test_each_tenant_has_a_part_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MAX_WAITING", 120)
    queue = WaitingRequests(FairShare())
    assert fill(queue, "a") == 60
    assert fill(queue, "a/salt") == 0, "a cache salt is no tenant"
    assert fill(queue, "b") == 40
    assert fill(queue, "c") == 20, "the rest"
    assert not queue.has_place(request("d0", "d"))
    begun = request("d0", "d")
    begun.num_attempts = 1
    assert queue.has_place(begun), "what was admitted keeps its answer"
    for number in range(60):
        queue.remove(RequestId(f"a{number}"))
    assert fill(queue, "d") == 30


def test_the_prompts_that_wait_are_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MAX_WAITING_TOKENS", 12_000)
    queue = WaitingRequests(FairShare())
    assert fill(queue, "a", num_tokens=1000) == 6
    assert fill(queue, "b", num_tokens=1000) == 4
    assert fill(queue, "c", num_tokens=2000) == 1


def test_a_flood_that_waits_is_refused_beyond_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MAX_WAITING", 20)
    desk = full_desk()
    found = [of(desk.ask(f"r{number}", tenant="a", **ROOM), Refuse) for number in range(30)]
    assert desk.conductor.num_waiting == 10
    assert sum(map(len, found)) == 20
    assert not of(desk.ask("b", tenant="b", **ROOM), Refuse)


def test_finished_answers_leave_no_call_behind() -> None:
    desk = Desk("p0", "d0")
    for number in range(3):
        desk.ask(f"c~{number}", call="a call")
        desk.decoding(f"c~{number}/{number + 1}")
        assert b"a call" in dump(desk.conductor)
        desk.tokens("d0", 51, finish=FinishReason.STOP, work=f"c~{number}/{number + 1}")
    assert b"a call" not in dump(desk.conductor)


def test_a_choice_goes_on_waiting_when_those_before_it_have_ended() -> None:
    """Another request took the room that the ended requests left."""
    desk = full_desk()
    desk.handle(RequestCancelled(RequestId("first")))
    desk.ask("c~0", call="c", ttft_s=0.1, **ROOM)
    desk.ask("c~1", call="c", ttft_s=0.1, **ROOM)
    desk.ask("urgent", priority=-1, **ROOM)
    assert placed(end(desk, "c~0")) == ["urgent"]
    assert not of(tick(desk, 5.0), Refuse)
    assert placed(end(desk, "urgent")) == ["c~1"]


def test_the_predicted_ttft_counts_what_a_request_has_waited() -> None:
    desk = full_desk()
    desk.ask("second", **ROOM)
    tick(desk, 7.0)
    end(desk, "first")
    second = desk.conductor.requests[RequestId("second")].record
    assert second.predicted_ttft_s == pytest.approx(0.016)
    assert second.expected_ttft_s == pytest.approx(7.016)


def test_times_that_no_prompt_has_confirmed_are_told_as_assumed() -> None:
    desk = Desk("p0", "d0", num_blocks=100_000)
    are_assumed: list[bool] = []
    for number in range(20):
        prompt = tuple(range(number * 100, number * 100 + 40))
        desk.ask(f"r{number}", token_ids=prompt)
        lines = desk.conductor.requests[RequestId(f"r{number}")].explanation.lines()
        are_assumed.append(f"p0: {ASSUMED_TIMES}" in lines)
        work = f"r{number}/{number + 1}"
        begun = PrefillStarted(attempt_id=AttemptId(work), cached_tokens=0, fetched_tokens=0)
        desk.report("p0", begun)
        desk.now += 0.04
        desk.prefilled(work)
        end(desk, f"r{number}")
    learned = are_assumed.index(False)
    assert learned >= MIN_SAMPLES * STEPS_PER_SAMPLE and not any(are_assumed[learned:])
