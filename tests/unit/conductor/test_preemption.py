"""Tests that answers of a tenant above its share give way to an answer of a tenant below its share,
and continue later."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from conductor_desk import LAYOUT, Desk, of, sent

from moonpool.conductor.actions import (
    ConductorAction,
    InstanceLost,
    Refuse,
    RequestCancelled,
    Tick,
)
from moonpool.protocol.messages import Abort, ReserveDecode, StartPrefill
from moonpool.types import InstanceId, RequestId

LONG = {"max_tokens": 1000, "sampling": {"ignore_eos": True}, "deadline_s": 600.0}


def placed(actions: list[ConductorAction]) -> list[str]:
    return [start.attempt.attempt_id.split("/")[0] for _, start in sent(actions, StartPrefill)]


def paused(actions: list[ConductorAction]) -> list[str]:
    return list(dict.fromkeys(a.attempt_id.split("/")[0] for _, a in sent(actions, Abort)))


class Flood:
    """Fills the room of the cluster with `number` answers of tenant "flood", each with 16 prompt
    tokens and 48 booked for its answer."""

    def __init__(self, *names: str, number: int = 10, prompt: int = 16, **config: Any) -> None:
        names = names or ("p0", "d0")
        self.desk = Desk(*names, num_blocks=number * (prompt + 48) // 4, **config)
        self.desk.conductor.output_predictor.lengths.mean.value = 48.0
        for count in range(number):
            self.ask(f"f{count}", "flood", count * 100, prompt)

    def ask(
        self, name: str, tenant: str, first: int, prompt: int = 16, **known: Any
    ) -> list[ConductorAction]:
        self.desk.now += 0.001
        tokens = tuple(range(first, first + prompt))
        return self.desk.ask(name, token_ids=tokens, tenant=tenant, **LONG, **known)

    def small(self, name: str = "s", **known: Any) -> list[ConductorAction]:
        tokens = tuple(range(90_000, 90_010))
        values = {"tenant": "small", "token_ids": tokens, "max_tokens": 8} | known
        return self.desk.ask(name, **values)


@pytest.mark.parametrize("admission", ["none", "baseline", "early", "predictive", "goodput"])
def test_the_youngest_answer_gives_way_at_once(admission: str) -> None:
    flood = Flood(admission=admission)
    actions = flood.small()
    assert (paused(actions), placed(actions)) == (["f9"], ["s"])
    assert not of(actions, Refuse)
    # The abort goes first, so that the instance knows whose blocks become free.
    commands = [type(c) for name, c in sent(actions, (Abort, ReserveDecode)) if name == "d0"]  # type: ignore[arg-type]
    assert commands == [Abort, ReserveDecode]
    lines = flood.desk.conductor.requests[RequestId("f9")].explanation.lines()
    assert lines[-1] == "pauses: another tenant is owed its share of this cluster"


def test_a_paused_answer_goes_on_with_the_same_tokens() -> None:
    flood = Flood("m0")
    desk = flood.desk
    desk.tokens("m0", 7, 8, 9, work="f9/10")
    assert paused(flood.small()) == ["f9"]
    desk.now += 1.0
    actions = desk.handle(RequestCancelled(RequestId("s")))
    assert not placed(actions), "the small answer held less room"
    actions = desk.handle(RequestCancelled(RequestId("f0")))
    ((_, start),) = sent(actions, StartPrefill)
    assert start.attempt.attempt_id.startswith("f9/")
    assert tuple(start.attempt.token_ids[-3:]) == (7, 8, 9)
    assert desk.conductor.requests[RequestId("f9")].record.attempts == 2


def test_no_answer_gives_way_to_its_own_tenant_or_to_one_that_has_more() -> None:
    flood = Flood()
    assert not paused(flood.ask("f10", "flood", 5000))
    assert not paused(flood.small("large", token_ids=tuple(range(600)), max_tokens=9)), "too much"


def test_as_many_give_way_as_the_request_needs_room_for() -> None:
    flood = Flood()
    actions = flood.small(token_ids=tuple(range(90_000, 90_100)))
    assert (paused(actions), placed(actions)) == (["f9", "f8"], ["s"])


def test_the_tenant_farthest_above_its_share_gives_way() -> None:
    desk = Desk("m0", num_blocks=160, weights={"rich": 4.0})
    desk.conductor.output_predictor.lengths.mean.value = 48.0
    for number, tenant in enumerate(["rich"] * 6 + ["poor"] * 4):
        desk.now += 0.001
        tokens = tuple(range(number * 100, number * 100 + 16))
        desk.ask(f"{tenant}{number}", token_ids=tokens, tenant=tenant, **LONG)
    desk.now += 0.001
    actions = desk.ask("s", tenant="small", max_tokens=8)
    assert (paused(actions), placed(actions)) == (["poor9"], ["s"])


def test_a_more_urgent_answer_does_not_give_way() -> None:
    flood = Flood()
    urgent = flood.desk.conductor.requests
    assert len(urgent) == 10
    actions = flood.small(priority=1)
    assert not paused(actions) and not placed(actions)
    assert flood.desk.conductor.num_waiting == 1


def test_two_tenants_that_flood_end_up_with_equal_parts() -> None:
    """The tenants must not take the room from each other again and again."""
    flood = Flood("m0")
    for number in range(10):
        flood.ask(f"o{number}", "other", 20_000 + 100 * number)
    pauses = [flood.desk.conductor.num_pauses]
    for _ in range(200):
        flood.desk.now += 0.5
        flood.desk.handle(Tick())
        pauses.append(flood.desk.conductor.num_pauses)
    running = [t for t in flood.desk.conductor.requests.values() if t.attempt is not None]
    parts = [sum(t.request.tenant == name for t in running) for name in ("flood", "other")]
    assert sum(parts) == 10 and abs(parts[0] - parts[1]) <= 2, parts
    assert pauses[-1] == pauses[100] <= 6


def test_an_answer_that_has_been_under_way_for_half_of_its_time_gives_way_last() -> None:
    flood = Flood(number=3)
    desk = flood.desk
    desk.handle(RequestCancelled(RequestId("f2")))
    tokens = tuple(range(300, 316))
    known = {**LONG, "deadline_s": desk.now + 10.0}
    desk.ask("old", token_ids=tokens, tenant="flood", **known)
    desk.now += 6.0
    assert paused(flood.small()) == ["f1"], "the youngest of the others"


def test_a_claim_waits_where_a_part_of_the_share_is_used() -> None:
    """A tenant gets up to half of its share at once, and all of its share after an eighth of its
    TTFT SLO."""
    flood = Flood()
    prompts = [tuple(range(first, first + 48)) for first in range(0, 200, 50)]
    found = [paused(flood.small(f"s{n}", token_ids=prompts[n])) for n in range(4)]
    assert [len(one) for one in found] == [1, 1, 0, 0]
    flood.desk.now += 3.7
    assert not paused(flood.desk.handle(Tick()))
    flood.desk.now += 0.1
    assert len(paused(flood.desk.handle(Tick()))) == 2


@pytest.mark.parametrize("inner", ["vllm", LAYOUT.inner])
def test_answers_that_outgrow_a_vllm_instance_give_way(inner: str) -> None:
    """Moonpool's own instances preempt by tenant; vLLM preempts the request that came last."""
    flood = Flood("m0", layout=msgspec.structs.replace(LAYOUT, inner=inner))
    desk = flood.desk
    flood.small()
    for number in range(3):
        desk.tokens("m0", *range(100), work=f"f{number}/{number + 1}")
    found = paused(desk.handle(Tick()))
    assert found == (["f8", "f7"] if inner == "vllm" else [])


@pytest.mark.parametrize("of_flood", [{"forwarded": True}, {"sampling": {"grammar": "g"}}])
def test_answers_that_could_not_continue_do_not_give_way(of_flood: dict[str, Any]) -> None:
    desk = Desk("m0", num_blocks=100, layout=msgspec.structs.replace(LAYOUT, inner="vllm"))
    for number in range(4):
        tokens = tuple(range(number * 100, number * 100 + 88))
        desk.ask(f"f{number}", token_ids=tokens, tenant="flood", **of_flood)
    for number in range(3):
        desk.tokens("m0", 1, work=f"f{number}/{number + 1}")
    small = {"token_ids": range(9000, 9010), "tenant": "small"}
    assert paused(desk.ask("s0", **small)) == ["f3"], "its answer has not begun"
    assert not paused(desk.ask("s1", **small, max_tokens=90))
    for number in range(3):
        desk.tokens("m0", *range(9), work=f"f{number}/{number + 1}")
    assert not paused(desk.handle(Tick()))


def test_calls_that_a_gateway_sends_do_not_give_way() -> None:
    """Their servers would compute on, and nothing would be booked for them."""
    desk = Desk("m0", num_blocks=100)
    for number in range(4):
        tokens = tuple(range(number * 100, number * 100 + 88))
        desk.ask(f"f{number}", token_ids=tokens, tenant="flood", pinned=True)
    desk.tokens("m0", 1, work="f0/1")
    assert not paused(desk.ask("s0", token_ids=range(9000, 9010), tenant="small"))


def test_no_answer_gives_way_where_the_request_may_not_be_served() -> None:
    flood = Flood("m0", "m1")
    for count in range(10, 20):
        flood.ask(f"f{count}", "flood", count * 100)
    actions = flood.small(within=(InstanceId("m1"),))
    assert placed(actions) == ["s"]
    assert [name for name, _ in sent(actions, Abort)] == ["m1"]


def test_an_instance_is_lost_whose_requests_give_way_to_one_of_them() -> None:
    desk = Desk("p0", "d0", num_blocks=250, admission="none")
    desk.ask("x0", token_ids=range(100), max_tokens=700, tenant="x")
    desk.decoding("x0/1")
    desk.ask("y", token_ids=range(5000, 5020), tenant="y")
    desk.ask("x1", token_ids=range(9000, 9450), tenant="x")
    desk.tokens("d0", *range(520), work="x0/1")  # more than was booked
    desk.join("p1")
    actions = desk.handle(InstanceLost(InstanceId("p0"), "it died"))
    assert (placed(actions), desk.conductor.num_waiting) == (["y"], 1)
    assert desk.conductor.requests[RequestId("x1")].attempt is None


def test_a_tenant_alone_on_vllm_keeps_its_answers() -> None:
    flood = Flood("m0", layout=msgspec.structs.replace(LAYOUT, inner="vllm"))
    flood.desk.tokens("m0", *range(200), work="f0/1")
    assert not paused(flood.desk.handle(Tick()))


def test_a_tenant_alone_uses_all_and_pauses_nothing() -> None:
    flood = Flood()
    for number in range(5):
        assert not paused(flood.ask(f"g{number}", "flood", 30_000 + number))
    assert flood.desk.conductor.num_pauses == 0
