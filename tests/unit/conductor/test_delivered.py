"""Tests requests that outlived their head: they arrive at the next head with the tokens that their
client has."""

from __future__ import annotations

import pytest
from conductor_desk import PROMPT, Desk, of, sent

from moonpool.conductor.actions import (
    ConductorAction,
    InstancesExpected,
    Refuse,
    RequestArrived,
    Tick,
)
from moonpool.protocol.messages import StartPrefill
from moonpool.types import InstanceId, Request, RequestId, Role, SamplingParams, Slo


def arrive(
    desk: Desk, delivered: tuple[int, ...] | None, ttft_s: float = 30.0, tenant: str = ""
) -> list[ConductorAction]:
    request = Request(
        request_id=RequestId("r"),
        token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=8),
        slo=Slo(ttft_s=ttft_s, tbt_s=1.0),
        arrived_s=desk.now,
        deadline_s=desk.now + 60.0,
        tenant=tenant,
    )
    return desk.handle(RequestArrived(request, delivered))


@pytest.mark.parametrize("delivered", [(), (50,), (50, 51, 52)])
def test_the_answer_goes_on_after_its_tokens(delivered: tuple[int, ...]) -> None:
    desk = Desk("p0", "d0")
    ((_, start),) = sent(arrive(desk, delivered), StartPrefill)
    assert tuple(start.attempt.token_ids) == PROMPT + delivered


def test_it_is_not_refused_for_load_as_a_new_one_is() -> None:
    desk = Desk("p0", "d0", admission="early")
    (refused,) = of(arrive(desk, None, ttft_s=1e-6), Refuse)
    assert refused.refusal.reason == "ttft_slo"
    desk = Desk("p0", "d0", admission="early")
    actions = arrive(desk, (50,), ttft_s=1e-6)
    assert not of(actions, Refuse)
    assert sent(actions, StartPrefill)


def test_it_waits_for_the_instances_of_the_earlier_head() -> None:
    desk = Desk()
    desk.handle(InstancesExpected({InstanceId("p0"): Role.PREFILL, InstanceId("d0"): Role.DECODE}))
    assert not of(arrive(desk, (50, 51)), Refuse)
    desk.now += 5.0
    actions = [*desk.handle(Tick()), *desk.join("p0")]
    assert not of(actions, Refuse)
    assert not sent(actions, StartPrefill)
    ((_, start),) = sent(desk.join("d0"), StartPrefill)
    assert tuple(start.attempt.token_ids) == (*PROMPT, 50, 51)
    (refuse,) = of(arrive(Desk(), (50, 51)), Refuse)
    assert refuse.refusal.reason == "no_instance", "no instance is expected"


def test_it_ends_at_its_deadline_and_with_its_last_token() -> None:
    desk = Desk()
    desk.handle(InstancesExpected({InstanceId("d0"): Role.DECODE, InstanceId("p0"): Role.PREFILL}))
    arrive(desk, (50,))
    desk.now += 61.0
    (refuse,) = of(desk.handle(Tick()), Refuse)
    assert refuse.refusal.status == 504
    desk = Desk("p0", "d0")
    ((_, start),) = sent(arrive(desk, tuple(range(50, 57))), StartPrefill)
    assert start.attempt.sampling.max_tokens - len(start.attempt.token_ids) + len(PROMPT) == 1
