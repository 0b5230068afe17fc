"""Tests that competing tenants share an overloaded cluster by the tokens that were computed for
them."""

from __future__ import annotations

from collections import Counter

import pytest
from conductor_desk import Desk, of, sent

from moonpool.conductor.actions import Refuse, RequestCancelled, Tick
from moonpool.conductor.waiting import fair_share
from moonpool.conductor.waiting.fair_share import ACTIVE_S, MAX_OWED_WAITING, FairShare
from moonpool.protocol.messages import StartPrefill
from moonpool.types import RequestId, payer_of

TOKENS = tuple(range(16))


class Market:
    """Plays an instance with room for 4 requests. Each tenant sends without pause; one request ends
    at each step."""

    def __init__(self, admission: str = "none", **weights: float) -> None:
        self.desk = Desk("m0", num_blocks=24, weights=weights, admission=admission)
        self.running: list[str] = []
        self.placed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._number = 0

    def send(self, tenant: str) -> None:
        self._number += 1
        name = f"{tenant}-{self._number}"
        tokens = tuple(range(self._number * 100, self._number * 100 + 16))
        actions = self.desk.ask(name, token_ids=tokens, tenant=tenant, max_tokens=8, ttft_s=30.0)
        self._note(actions)

    def step(self) -> None:
        self.desk.now += 0.25
        if self.running:
            self._note(self.desk.handle(RequestCancelled(RequestId(self.running.pop(0)))))
        self._note(self.desk.handle(Tick()))

    def _note(self, actions: list[object]) -> None:
        for refuse in of(actions, Refuse):  # type: ignore[type-var, arg-type]
            self.refused[refuse.request_id.split("-")[0]] += 1
        for _, start in sent(actions, StartPrefill):  # type: ignore[arg-type]
            name = start.attempt.attempt_id.split("/")[0]
            self.running.append(name)
            self.placed[name.split("-")[0]] += 1


@pytest.mark.long
def test_a_flood_of_one_tenant_refuses_no_small_request_of_another() -> None:
    market = Market()
    for turn in range(200):
        for _ in range(10):
            market.send("flood")
        if turn > 20 and turn % 4 == 0:
            market.send("small")
        market.step()
    assert market.refused["small"] == 0
    assert market.placed["small"] >= 43
    assert market.placed["flood"] > 100, "what is left is for the flood"


@pytest.mark.long
@pytest.mark.parametrize(("weights", "ratio"), [({}, 1.0), ({"a": 3.0}, 3.0)])
def test_tenants_that_all_flood_get_shares_by_weight(
    weights: dict[str, float], ratio: float
) -> None:
    market = Market(**weights)
    for _ in range(200):
        for tenant in ("a", "b") * 3:
            market.send(tenant)
        market.step()
    found = market.placed["a"] / market.placed["b"]
    assert ratio / 1.3 < found < ratio * 1.3, market.placed


def test_a_tenant_alone_waits_for_room_and_is_refused_what_would_be_late() -> None:
    market = Market("baseline")
    for _ in range(60):
        for _ in range(10):
            market.send("only")
        market.step()
    assert market.placed["only"] > 40, "it uses all there is"
    assert market.refused["only"] > 300
    assert 0 < market.desk.conductor.num_waiting < 200


def test_without_admission_a_tenant_alone_waits_for_room_and_is_refused_nothing() -> None:
    market = Market()
    for _ in range(30):
        for _ in range(10):
            market.send("only")
        market.step()
    assert market.placed["only"] > 20 and not market.refused
    assert market.desk.conductor.num_waiting == 300 - market.placed["only"]


def test_shares_know_who_competes_and_who_is_owed() -> None:
    shares = FairShare({"big": 2.0})
    big = shares.begin("big", 0.0)
    assert not shares.is_owed("big", 0.0), "there is nobody else"
    big.charge(100, 0.0)
    small = shares.begin("small", 1.0)
    assert shares.is_owed("small", 1.0) and not shares.is_owed("big", 1.0)
    assert shares.level("big", 0.0) == 50.0
    shares.begin_wait("small")
    assert shares.must_yield("big", 1.0) and not shares.must_yield("small", 1.0)
    shares.end_wait("small")
    assert not shares.must_yield("big", 1.0)
    for name, account in (("big", big), ("small", small)):
        shares.end(name, account)
    assert not shares.is_owed("small", 2.0 + ACTIVE_S), "the other one has stopped"
    for _ in range(MAX_OWED_WAITING):
        shares.begin_wait("small")
    assert not shares.may_wait("small", 1.0)
    assert payer_of("small/salt") == payer_of("small/other") == "small"


def test_tenants_compete_while_two_sent_lately() -> None:
    shares = FairShare()

    def request(tenant: str, now: float) -> None:
        shares.end(tenant, shares.begin(tenant, now))

    assert not shares.compete(0.0)
    request("a", 0.0)
    request("a", 1.0)
    assert not shares.compete(1.0), "one tenant alone"
    request("b", 5.0)
    assert shares.compete(5.0)
    request("b", 1.0 + ACTIVE_S)
    assert shares.compete(1.0 + ACTIVE_S)
    request("b", 1.1 + ACTIVE_S)
    assert not shares.compete(1.1 + ACTIVE_S), "the other one has ended"


def test_a_tenant_competes_for_as_long_as_its_answers_run() -> None:
    """The tokens that tenants hold must count in full, whatever was computed long ago."""
    shares = FairShare()
    flood = shares.begin("flood", 0.0)
    flood.held_tokens += 1000
    for later_s in (0.5, ACTIVE_S + 1.0, 3600.0):
        small = shares.begin("small", later_s)
        assert shares.compete(later_s) and shares.is_owed("small", later_s)
        assert shares.level("flood", later_s) == 1000.0
        shares.end("small", small)
    shares.end("flood", flood)
    assert not shares.compete(3600.0)


def test_what_was_computed_fades_by_half_in_twenty_seconds() -> None:
    shares = FairShare()
    account = shares.begin("a", 0.0)
    for tenth in range(10):
        account.charge(10, tenth / 10)
    assert shares.level("a", 1.0) == pytest.approx(100.0, rel=0.04)
    assert shares.level("a", 21.0) == pytest.approx(50.0, rel=0.04)
    assert shares.level("a", 1e6) == 0.0


def test_no_tenant_with_requests_under_way_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 3)
    shares = FairShare()
    busy = shares.begin("busy", 0.0)
    busy.held_tokens = 10
    for number in range(20):
        name = f"t{number}"
        shares.end(name, shares.begin(name, float(number)))
    assert shares.level("busy", 20.0) == 10.0
    shares.validate_held({"busy": [10]})
