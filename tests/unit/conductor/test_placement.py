"""Algorithm 1 as mended: each mend has a test that fails with the paper's version put back."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.placement import Demand, InstanceView, Placement, Rejection, place
from moonpool.config import ConductorConfig
from moonpool.types import InstanceId, Role, Slo

CONFIG = ConductorConfig()
TOKEN_BYTES = 1000


class LinearCost:
    """1 ms per token of prefill, 10 ms per decode of a batch, 1 us per transferred byte."""

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        return 0.001 * (num_tokens - cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return 0.01 * batch + 1e-6 * context_tokens

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        return num_bytes * (1e-8 if same_host else 1e-6) * num_sharing


def view(name: str, role: Role | None = None, **known: Any) -> InstanceView:
    letters = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
    values: dict[str, Any] = {
        "cost": LinearCost(),
        "host_id": "",
        "hit_tokens": 0,
        "source_tokens": 0,
        "queue_s": 0.0,
        "num_fetches_served": 0,
        "decode_batch": 0,
        "decode_context_tokens": 0,
        "room_tokens": 100_000,
        "next_exit_s": 0.0,
        "last_placed_s": float("-inf"),
        **known,
    }
    if "hit_tokens" not in known:
        values["hit_tokens"] = values["source_tokens"]
    return InstanceView(instance_id=InstanceId(name), role=role or letters[name[0]], **values)


def demand(num_tokens: int = 1000, ttft_s: float = 30.0, tbt_s: float = 1.0, **k: Any) -> Demand:
    values: dict[str, Any] = {"expected_tokens": num_tokens + 100, "decodes": True, **k}
    slo = Slo(ttft_s=ttft_s, tbt_s=tbt_s)
    return Demand(num_tokens=num_tokens, token_bytes=TOKEN_BYTES, slo=slo, **values)


def placed(wanted: Demand, *views: InstanceView, config: ConductorConfig = CONFIG) -> Placement:
    decision = place(wanted, views, config)
    assert isinstance(decision, Placement), decision
    return decision


def rejected(wanted: Demand, *views: InstanceView, config: ConductorConfig = CONFIG) -> Rejection:
    decision = place(wanted, views, config)
    assert isinstance(decision, Rejection), decision
    return decision


# Prefill


def test_the_shortest_ttft_wins_over_the_longest_hit() -> None:
    busy = view("p0", source_tokens=900, queue_s=2.0)
    idle = view("p1", host_id="far")
    decision = placed(demand(), busy, idle, view("d0"), config=ConductorConfig())
    assert decision.prefill == "p1"
    assert decision.ttft_s == pytest.approx(0.1 + 0.9), "with the fetch of what p0 has"


def test_ties_go_to_the_instance_idle_longest() -> None:
    views = [view("p0", last_placed_s=5.0), view("p1", last_placed_s=3.0), view("d0")]
    assert placed(demand(), *views).prefill == "p1"
    views[1] = view("p1", last_placed_s=7.0)
    assert placed(demand(), *views).prefill == "p0"


def test_no_hit_anywhere_is_no_fetch() -> None:
    decision = placed(demand(), view("p0"), view("p1"), view("d0"))
    assert decision.fetch_from is None and decision.fetch_tokens == 0
    assert decision.prefill_s == pytest.approx(1.0)


def test_a_hit_elsewhere_and_none_here_is_worth_a_fetch() -> None:
    """The paper's ratio divides by the local hit, which is 0 here."""
    high = ConductorConfig(kvcache_balancing_threshold=100.0)
    source = view("d0", source_tokens=800, host_id="h")
    decision = placed(demand(), view("p0", host_id="h"), source, config=high)
    assert (decision.fetch_from, decision.fetch_tokens) == ("d0", 800)
    assert decision.hit_tokens == 800


def test_at_the_threshold_there_is_neither_fetch_nor_its_score() -> None:
    config = ConductorConfig(kvcache_balancing_threshold=2.0)
    local = view("p0", source_tokens=400, host_id="h")
    at = placed(demand(), local, view("d0", source_tokens=800, host_id="h"), config=config)
    assert at.fetch_from is None and at.hit_tokens == 400
    assert at.ttft_s == at.prefill_s == pytest.approx(0.6)
    over = placed(demand(), local, view("d0", source_tokens=801, host_id="h"), config=config)
    assert over.fetch_from == "d0" and over.ttft_s < 0.6


def test_no_fetch_when_computing_is_faster() -> None:
    """The threshold only permits a fetch. Remotely, a token takes as long as computing it."""
    near = placed(demand(), view("p0", host_id="h"), view("d0", source_tokens=500, host_id="h"))
    assert near.fetch_from == "d0"
    slow = view("d0", source_tokens=500, num_fetches_served=1)
    far = placed(demand(), view("p0"), slow)
    assert far.fetch_from is None and far.ttft_s == pytest.approx(1.0)


def test_a_fetch_runs_while_the_request_waits() -> None:
    """The plain sum would say 0.5 + 0.5 + 0.5 here, and compute instead (0.5 + 1.0)."""
    decision = placed(demand(), view("p0", queue_s=0.6), view("d0", source_tokens=500))
    assert decision.fetch_from == "d0"
    assert decision.ttft_s == pytest.approx(max(0.6, 0.5) + 0.5)


def test_what_lies_in_a_decode_instance_can_be_fetched() -> None:
    source = view("d0", source_tokens=900, host_id="h")
    decision = placed(demand(), view("p0", source_tokens=100, host_id="h"), source)
    assert (decision.fetch_from, decision.fetch_tokens) == ("d0", 900)


def test_only_what_is_held_now_can_be_fetched() -> None:
    expecting = view("p1", hit_tokens=900, source_tokens=0, queue_s=9.0)
    decision = placed(demand(), view("p0", host_id="h"), expecting, view("d0"))
    assert decision.prefill == "p0" and decision.fetch_from is None


def test_a_busy_source_is_shared() -> None:
    busy = view("d0", source_tokens=500, host_id="h", num_fetches_served=5)
    idle = view("d1", source_tokens=500, host_id="h", num_fetches_served=0)
    assert placed(demand(), view("p0", host_id="h"), busy, idle).fetch_from == "d1"


def test_an_instance_does_not_fetch_from_itself() -> None:
    mixed = view("m0", source_tokens=500, hit_tokens=0)
    assert placed(demand(), mixed).fetch_from is None


def test_the_explanation_names_every_candidate() -> None:
    decision = placed(demand(), view("p0"), view("p1"), view("d0"))
    assert len(decision.reasons) == 2
    assert {reason.split(":")[0] for reason in decision.reasons} == {"p0", "p1"}


# Decode


def test_decode_goes_where_tokens_come_fastest() -> None:
    busy, idle = view("d0", decode_batch=4, source_tokens=900), view("d1")
    assert placed(demand(), view("p0"), busy, idle).decode == "d1"


def test_among_near_equals_the_one_that_holds_most() -> None:
    one = view("d0", decode_batch=4, last_placed_s=1.0)
    two = view("d1", decode_batch=4, decode_context_tokens=10, source_tokens=512, last_placed_s=2.0)
    assert placed(demand(), view("p0"), one, two).decode == "d1"
    assert placed(demand(), view("p0"), one, view("d1", decode_batch=4)).decode == "d1"


def test_an_instance_without_room_is_not_chosen() -> None:
    full, busy = view("d0", room_tokens=1099), view("d1", decode_batch=9)
    assert placed(demand(), view("p0"), full, busy).decode == "d1"
    exact = view("d0", room_tokens=1100)
    assert placed(demand(), view("p0"), exact, busy).decode == "d0"


def test_one_token_needs_no_decode_instance() -> None:
    decision = placed(demand(decodes=False), view("p0"), view("d0", room_tokens=0))
    assert decision.decode is None and decision.tbt_s == 0.0


# Mixed instances


def test_a_mixed_instance_goes_on_by_itself() -> None:
    decision = placed(demand(), view("m0"), view("d0"))
    assert (decision.prefill, decision.decode) == ("m0", None)
    assert decision.tbt_s > 0


def test_a_prefill_instance_may_hand_over_to_a_mixed_one() -> None:
    decision = placed(demand(), view("p0"), view("m0", queue_s=5.0))
    assert (decision.prefill, decision.decode) == ("p0", "m0")


def test_a_full_mixed_instance_does_not_stand_for_all() -> None:
    full = view("m0", room_tokens=10)
    other = placed(demand(), full, view("m1", queue_s=0.5))
    assert (other.prefill, other.decode) == ("m1", None)
    pair = placed(demand(), full, view("p0", queue_s=0.5), view("d0"))
    assert (pair.prefill, pair.decode) == ("p0", "d0")
    assert rejected(demand(), full).reason == "no_decode_capacity"


# Refusals


def test_nobody_is_up() -> None:
    assert (rejected(demand()).status, rejected(demand()).reason) == (503, "no_prefill_instance")
    assert rejected(demand(), view("d0")).reason == "no_prefill_instance"
    assert rejected(demand(), view("p0")).reason == "no_decode_instance"


def test_no_room_says_when_there_may_be_some() -> None:
    views = [
        view("p0"),
        view("d0", room_tokens=5, decode_batch=3, next_exit_s=12.0),
        view("d1", room_tokens=5, decode_batch=3, next_exit_s=7.0),
    ]
    refusal = rejected(demand(), *views)
    assert (refusal.status, refusal.reason) == (503, "no_decode_capacity")
    assert refusal.retry_after_s == 7.0 and "1100 more tokens" in refusal.message


def test_room_that_no_idle_instance_has() -> None:
    refusal = rejected(demand(), view("p0"), view("d0", room_tokens=5))
    assert "not even an idle one" in refusal.message and refusal.retry_after_s > 0


def test_too_late_is_refused_with_the_time_it_lacks() -> None:
    refusal = rejected(demand(ttft_s=2.0), view("p0", queue_s=4.0), view("d0"))
    assert (refusal.status, refusal.reason) == (429, "ttft_slo")
    assert refusal.retry_after_s == pytest.approx(4.0 + 1.0 - 2.0)
    assert "idle" not in refusal.message


def test_too_long_for_any_instance_says_so() -> None:
    refusal = rejected(demand(num_tokens=5000, ttft_s=2.0), view("p0"), view("d0"))
    assert refusal.reason == "ttft_slo" and "shorten the prompt" in refusal.message


def test_too_slow_is_refused_until_a_decode_ends() -> None:
    busy = view("d0", decode_batch=9, next_exit_s=3.0)
    refusal = rejected(demand(tbt_s=0.05), view("p0"), busy)
    assert (refusal.status, refusal.reason) == (429, "tbt_slo")
    assert refusal.retry_after_s == 3.0 and "idle" not in refusal.message
    hopeless = rejected(demand(tbt_s=0.001), view("p0"), busy)
    assert "even on an idle instance" in hopeless.message


def test_exactly_the_slo_is_met() -> None:
    assert placed(demand(ttft_s=1.0), view("p0"), view("d0")).ttft_s == pytest.approx(1.0)


def test_without_admission_all_that_fits_is_placed() -> None:
    lax = ConductorConfig(admission="none")
    wanted = demand(ttft_s=0.001, tbt_s=0.001)
    assert placed(wanted, view("p0"), view("d0"), config=lax).prefill == "p0"
    assert rejected(wanted, view("p0"), view("d0", room_tokens=0), config=lax).status == 503


def test_placing_changes_nothing() -> None:
    views = [view("p0", queue_s=1.0), view("p1"), view("d0", source_tokens=64)]
    assert place(demand(), views, CONFIG) == place(demand(), views, CONFIG)
