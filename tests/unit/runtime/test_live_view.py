"""Tests the frames of the live page: sums, percentiles, history, and the view of a tenant."""

from __future__ import annotations

import json

from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import Config
from moonpool.head.watch.live_view import NUM_LISTED, RECENT_S, describe_live
from moonpool.request_record import RequestRecord
from moonpool.types import InstanceId, RequestId, Slo

SLO = Slo(ttft_s=1.0, tbt_s=0.1)
NOW = 10_005.0


def record(name: str, ended_s: float, **fields: object) -> RequestRecord:
    made = RequestRecord(RequestId(name), 100, SLO, ended_s - 2.0, outcome="stop")
    made.placed_s = made.prefill_started_s = ended_s - 1.9
    made.prefill_done_s = made.first_token_s = made.last_token_s = ended_s - 1.5
    made.finished_s, made.num_generated_tokens = ended_s, 10
    made.prefill_instance = InstanceId("prefill-0")
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def frame(records: list[RequestRecord], tenant: str | None = None) -> dict[str, object]:
    conductor = Conductor(Config().conductor, incarnation="l", default_slo=SLO)
    found = describe_live([conductor], records, NOW, tenant)
    decoded: dict[str, object] = json.loads(json.dumps(found))
    return decoded


def test_an_empty_cluster_has_a_frame() -> None:
    found = frame([])
    assert found["instances"] == found["requests"] == []
    assert found["under_way"] == 0


def test_prompt_tokens_are_split_by_tier_and_refusals_by_reason() -> None:
    cached = record("a", NOW - 1, cached_tokens=80, fetched_tokens=30, loaded_tokens=20)
    refused = record("b", NOW - 2, outcome="ttft_slo", prefill_done_s=None, first_token_s=None)
    found = frame([cached, refused])
    totals, listed = found["totals"], found["requests"]
    assert isinstance(totals, dict) and isinstance(listed, list)
    # The length of a prompt is known before its tokens are computed.
    assert [each["prompt_tokens"] for each in listed] == [100, 100]
    assert totals["tokens"] == {"dram": 30, "fetched": 30, "ssd": 20, "computed": 20}
    assert totals["not_answered"] == {"ttft_slo": 1}
    assert (totals["ended"], totals["answered"], totals["effective"]) == (2, 1, 1)
    assert totals["ttft_s"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5}


def test_sums_forget_what_ended_ten_minutes_ago() -> None:
    ends = (NOW - 1, NOW - 11, NOW - RECENT_S + 1, NOW - RECENT_S - 1)
    totals = frame([record(f"r{i}", end) for i, end in enumerate(ends)])["totals"]
    assert isinstance(totals, dict)
    assert totals["answered"] == 3


def test_a_tenant_sees_its_own_requests_and_their_ids() -> None:
    records = [
        record("ann/r1", NOW - 1, tenant="ann"),
        record("bob/r2", NOW - 1, tenant="bob"),
        record("ann/r3", NOW - 1, tenant="ann/salt"),
    ]
    own = frame(records, "ann")
    assert isinstance(own["requests"], list) and isinstance(own["totals"], dict)
    assert [one["id"] for one in own["requests"]] == ["r1", "r3"]
    assert own["totals"]["ended"] == 2
    assert own["loads"] is None
    assert "bob" not in json.dumps(own)
    every = frame(records)["requests"]
    assert isinstance(every, list)
    assert [(one["tenant"], one["id"]) for one in every][1] == ("bob", "r2")


def test_a_frame_lists_a_bounded_number_of_requests() -> None:
    listed = frame([record(f"r{i}", NOW - 1) for i in range(500)])["requests"]
    assert isinstance(listed, list)
    assert len(listed) == NUM_LISTED
    assert listed[0]["id"] == "r0"
    assert sum(listed[0]["stages_s"].values()) == listed[0]["seconds"] == 2.0


def test_programs_are_shown_with_their_parents() -> None:
    sub = record("a", NOW - 1, program="sub", parent_program="lead", tenant="sales")
    found = frame([sub, record("b", NOW - 1, program="lead", tenant="sales")])
    assert {group["name"] for group in found["programs"]} == {"sales: sub (of lead)", "sales: lead"}
    assert {one["parent_program"] for one in found["requests"]} == {"lead", ""}
