"""Tests that the events of the live page follow from the Conductors' state, tick by tick."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moonpool.head.watch.live_events import MAX_EVENTS, REFUSALS_S, LiveEvents
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId, Role, Slo


def state(role: Role = Role.PREFILL, drain: str = "", **load: Any) -> Any:
    counters = load.get("counters", {})
    ssd = SimpleNamespace(error=load["ssd_error"]) if "ssd_error" in load else None
    return SimpleNamespace(
        role=role,
        drain=SimpleNamespace(reason=drain) if drain else None,
        load=SimpleNamespace(counters=counters, ssd=ssd),
    )


def watch() -> tuple[dict[str, Any], LiveEvents]:
    instances: dict[str, Any] = {}
    conductor: Any = SimpleNamespace(instances=instances)
    return instances, LiveEvents([conductor])


def kinds(events: LiveEvents, now: float) -> list[str]:
    return [each["kind"] for each in events.describe(now)]


def test_instances_come_drain_change_and_go() -> None:
    instances, events = watch()
    instances |= {"prefill-0": state(), "decode-0": state(Role.DECODE)}
    events.tick(0.0)
    assert kinds(events, 0.0) == ["joined", "joined"]
    instances["decode-0"] = state(Role.DECODE, drain="a client requested it")
    events.tick(1.0)
    del instances["decode-0"]
    instances["prefill-0"] = state(Role.DECODE)
    events.tick(2.0)
    del instances["prefill-0"]
    events.tick(3.0)
    assert kinds(events, 3.0)[:4] == ["lost", "role", "left", "draining"]
    lost, role, left, _ = events.describe(3.0)[:4]
    assert lost["fault"] and lost["s_ago"] == 0.0 and not left["fault"]
    assert role["text"] == "prefill-0 was prefill and is decode now"
    assert left["text"] == "decode-0: a client requested it"


def test_damage_and_disks_are_told_once() -> None:
    instances, events = watch()
    instances["p"] = state()
    events.tick(0.0)
    for now in (1.0, 2.0):
        instances["p"] = state(counters={"corrupt_slices": 3}, ssd_error="no space left")
        events.tick(now)
    assert kinds(events, 2.0) == ["disk", "damaged", "joined"]
    assert "3 damaged slices were found at p" in events.describe(2.0)[1]["text"]


def record(outcome: str) -> RequestRecord:
    return RequestRecord(RequestId("r"), 10, Slo(ttft_s=1.0, tbt_s=1.0), 0.0, outcome=outcome)


def test_refusals_of_ten_seconds_are_one_event_and_who_leaves_is_no_fault() -> None:
    _, events = watch()
    for outcome in ("stop", "abort", "ttft_slo", "ttft_slo", "deadline"):
        events.request_ended(record(outcome), 5.0)
    (only,) = events.describe(6.0)
    assert only["text"] == "3 requests without an answer: 2 TTFT SLO, 1 deadline"
    events.tick(5.0 + REFUSALS_S)
    events.request_ended(record("deadline"), 20.0)
    assert [each["text"].partition(" ")[0] for each in events.describe(20.0)] == ["1", "3"]


def test_the_list_is_bounded() -> None:
    instances, events = watch()
    for number in range(3 * MAX_EVENTS):
        instances.clear()
        instances[f"i-{number}"] = state()
        events.tick(float(number))
    assert len(events.describe(1e6)) == MAX_EVENTS
