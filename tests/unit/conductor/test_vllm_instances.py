"""Tests cases that only vLLM servers as instances have: forwarded requests, their own adapters, and
times that are measured after they joined."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from moonpool.conductor.actions import (
    Deliver,
    InstanceJoined,
    InstanceLost,
    Refuse,
    RequestEnded,
    Send,
)
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import (
    AdaptersLoaded,
    AttemptFailed,
    AttemptId,
    CostMeasured,
    PrefillStarted,
    StartPrefill,
    request_of,
)
from moonpool.protocol.model_offer import OfferedAdapter
from moonpool.types import FinishReason, InstanceId, RequestId
from moonpool.vllm.nominal_layout import NO_ADDRESS
from tests.unit.conductor.conductor_desk import Desk, of


def desk(*names: str) -> Desk:
    return Desk(*(names or ("m0", "m1")), admission="none")


def place(actions: list[object]) -> tuple[str, AttemptId]:
    """Returns the instance that got the request, and the number of the attempt."""
    (send,) = [a for a in actions if isinstance(a, Send) and isinstance(a.command, StartPrefill)]
    return send.instance_id, send.command.attempt.attempt_id


def failed(attempt: AttemptId, reason: str = "engine_error", status: int = 0) -> AttemptFailed:
    return AttemptFailed(attempt_id=attempt, reason=reason, message="gone", engine_status=status)


def test_before_its_first_part_a_forwarded_request_is_tried_elsewhere() -> None:
    front = desk()
    first, attempt = place(front.ask(forwarded=True))
    assert request_of(attempt) == "r"
    second, again = place(front.report(first, failed(attempt)))
    assert second != first
    assert request_of(again) == "r"
    actions = front.tokens(second, 0, finish=FinishReason.STOP, work=again)
    assert of(actions, Deliver)
    front.assert_nothing_is_booked()


def test_after_its_first_part_it_ends_with_one_error() -> None:
    for by in ("fault", "loss"):
        front = desk()
        first, attempt = place(front.ask(forwarded=True))
        front.tokens(first, 0, work=attempt)
        if by == "fault":
            actions = front.report(first, failed(attempt))
        else:
            actions = front.handle(InstanceLost(InstanceId(first), "gone"))
        (refuse,) = of(actions, Refuse)
        assert refuse.refusal.status == 503
        assert not [a for a in of(actions, Send) if isinstance(a.command, StartPrefill)]
        front.assert_nothing_is_booked()


def test_a_request_of_tokens_still_goes_on() -> None:
    front = desk()
    first, attempt = place(front.ask())
    front.tokens(first, 50, work=attempt)
    second, _ = place(front.report(first, failed(attempt)))
    assert second != first


def test_the_engines_status_is_the_refusals() -> None:
    for status, expected in ((404, 404), (422, 422), (0, 400)):
        front = desk("m0")
        _, attempt = place(front.ask(forwarded=True))
        (refuse,) = of(front.report("m0", failed(attempt, "refused_by_engine", status)), Refuse)
        assert refuse.refusal.status == expected


def test_forwarded_requests_teach_no_times() -> None:
    front = desk("m0")
    for number in range(40):
        _, attempt = place(front.ask(f"r{number}", forwarded=True))
        front.report(
            "m0",
            PrefillStarted(attempt_id=attempt, cached_tokens=0, fetched_tokens=0, early=True),
        )
        front.now += 20.0
        (ended,) = of(front.tokens("m0", 0, finish=FinishReason.STOP, work=attempt), RequestEnded)
        assert ended.record.ttft_s == 20.0, "it is shown all the same"
    state = front.conductor.instances[InstanceId("m0")]
    assert state.prefill_factor.value == 1.0
    assert front.conductor.instance_table.ttft_tail == 1.0
    assert front.conductor.cost_estimator.ttft_s.count == 0


def joined(front: Desk, name: str, *adapters: str, **facts: Any) -> None:
    info = front.conductor.instances[InstanceId(name)].info
    front.handle(InstanceLost(InstanceId(name), "it returns"))
    front.handle(InstanceJoined(replace(info, adapters=adapters, **facts)))


def test_an_adapter_is_asked_for_where_it_is() -> None:
    front = desk("m0", "m1", "m2")
    joined(front, "m1", "poet")
    assert {place(front.ask(f"r{n}", adapter="poet"))[0] for n in range(6)} == {"m1"}
    first, attempt = place(front.ask("x", adapter="poet"))
    again, _ = place(front.report(first, failed(attempt)))
    assert again == "m1", "there is no other"
    (refuse,) = of(front.ask("y", adapter="nobody"), Refuse)
    assert refuse.refusal.status == 503
    assert "adapter" in refuse.refusal.message


def test_an_adapter_that_is_loaded_later_is_found_and_one_that_is_unloaded_is_not() -> None:
    front = desk("m0", "m1")
    front.report("m1", AdaptersLoaded((OfferedAdapter("poet", "/a"),)))
    assert {place(front.ask(f"r{n}", adapter="poet"))[0] for n in range(3)} == {"m1"}
    front.report("m1", AdaptersLoaded(()))
    (refuse,) = of(front.ask("y", adapter="poet"), Refuse)
    assert refuse.refusal.status == 503


def test_a_request_does_not_wait_for_room_on_instances_that_may_not_serve_it() -> None:
    front = desk("m0", "m1", "p0")
    joined(front, "m1", "poet", context_tokens=16)
    wanted = {"token_ids": tuple(range(20)), "stated": False}
    assert place(front.ask("x", **wanted))
    for name, limits in (("y", {"adapter": "poet"}), ("z", {"within": (InstanceId("m1"),)})):
        (refuse,) = of(front.ask(name, **wanted, **limits), Refuse)
        found = refuse.refusal
        assert (found.status, found.reason) == (422, "no_prefill_capacity")
        assert "the 16 tokens of context" in found.message
    (refuse,) = of(front.ask("w", within=(InstanceId("p0"),)), Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (503, "no_decode_instance")


@pytest.mark.parametrize(("caches", "second_s"), [(True, 0.012), (False, 0.02)])
def test_hits_are_expected_only_where_prefixes_are_cached(caches: bool, second_s: float) -> None:
    """The second prompt waits for the first one, 0.01 s, and is equal to it."""
    front = desk("m0")
    joined(front, "m0", caches_prefixes=caches)
    found = []
    for name in ("first", "second"):
        front.ask(name)
        found.append(front.conductor.requests[RequestId(name)].record.predicted_ttft_s)
    assert found == pytest.approx([0.01, second_s])


def test_a_pool_that_opens_after_its_server_joined_counts() -> None:
    """The pool keeps prefixes, also of a server without a prefix cache, and others on its host read
    it from memory."""
    front = desk("m0", "m1")
    pool = front.conductor.instances[InstanceId("m0")].info.address
    joined(front, "m0", caches_prefixes=False, address=NO_ADDRESS)
    table = front.conductor.instance_table
    assert len(set(table.host.tolist())) == 2
    cost = front.conductor.instances[InstanceId("m0")].info.cost
    front.report("m0", CostMeasured(cost=cost, address=pool))
    assert len(set(table.host.tolist())) == 1 and list(table.num_on_host.values()) == [2]
    front.handle(InstanceLost(InstanceId("m1"), "it ended"))
    assert list(table.num_on_host.values()) == [1]
    found = []
    for name in ("first", "second"):
        front.ask(name)
        found.append(front.conductor.requests[RequestId(name)].record.predicted_ttft_s)
    assert found == pytest.approx([0.01, 0.012])


def test_measured_times_take_the_place_of_assumed_ones() -> None:
    front = desk("m0")
    state = front.conductor.instances[InstanceId("m0")]
    for _ in range(40):
        state.prefill_factor.observe(2.0, 1.0)
    cost = FittedCost(prefill=(1.0, 0.0, 0.0, 0.0), decode=(0.5, 0.0, 0.0), tile_tokens=16)
    front.report("m0", CostMeasured(cost=cost))
    assert state.info.cost == cost
    assert front.conductor.instance_table.tile_tokens.tolist() == [16.0]
    assert state.prefill_factor.value == 1.0
    _, attempt = place(front.ask())
    record = front.conductor.requests[request_of(attempt)].record
    assert record.predicted_ttft_s == 1.0
    assert record.predicted_tbt_s == 0.5


def test_a_prefill_that_began_by_assumed_times_teaches_nothing_of_measured_ones() -> None:
    front = desk("m0")
    _, attempt = place(front.ask())
    front.report("m0", PrefillStarted(attempt_id=attempt, cached_tokens=0, fetched_tokens=0))
    cost = FittedCost(prefill=(1.0, 0.0, 0.0, 0.0), decode=(0.5, 0.0, 0.0))
    front.report("m0", CostMeasured(cost=cost))
    front.now += 1.0  # as measured, and a hundred times as long as assumed
    front.tokens("m0", 50, work=attempt)
    factor = front.conductor.instances[InstanceId("m0")].prefill_factor
    assert not factor.has_steps


def test_a_request_goes_only_to_those_that_may_serve_it() -> None:
    """A gateway's subset hint names the instances that the request may use."""
    front = desk("m0", "m1", "m2")
    within = (InstanceId("m1"), InstanceId("m2"), InstanceId("elsewhere"))
    first, attempt = place(front.ask("x", within=within))
    assert first in within
    again, _ = place(front.report(first, failed(attempt)))
    assert {first, again} == {"m1", "m2"}
    only = (InstanceId("m0"),)
    first, attempt = place(front.ask("w", within=only))
    again, _ = place(front.report(first, failed(attempt)))
    assert (first, again) == ("m0", "m0"), "there is no other"
    (refuse,) = of(front.ask("y", within=(InstanceId("elsewhere"),)), Refuse)
    assert refuse.refusal.status == 503
    (refuse,) = of(front.ask("z", within=()), Refuse)
    assert refuse.refusal.status == 503
