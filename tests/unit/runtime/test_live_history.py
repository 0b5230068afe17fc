"""Tests an hour of samples: their fields, the removal of old ones, the view of a tenant, and their
size."""

from __future__ import annotations

import pytest

from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import Config
from moonpool.head.watch import live_history
from moonpool.head.watch.live_history import BIN_S, MAX_TENANTS, NUM_BINS, LiveHistory
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId, Slo

SLO = Slo(ttft_s=1.0, tbt_s=0.1)
BEGIN_S = 10_000.0


def record(ended_s: float, ttft_s: float = 0.5, tenant: str = "") -> RequestRecord:
    made = RequestRecord(RequestId("r"), 100, SLO, ended_s - 2.0, outcome="stop", tenant=tenant)
    made.first_token_s = made.arrived_s + ttft_s
    made.prefill_done_s, made.finished_s = made.first_token_s, ended_s
    made.num_generated_tokens, made.cached_tokens = 10, 25
    return made


def conductor() -> Conductor:
    return Conductor(Config().conductor, incarnation="l", default_slo=SLO)


def columns(
    history: LiveHistory, now: float, tenant: str | None = None
) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = history.describe(now, tenant)["columns"]
    assert {len(values) for values in found.values()} == {NUM_BINS}
    return found


def test_requests_stand_in_the_sample_of_their_end() -> None:
    history = LiveHistory([conductor()])
    for ended_s in (BEGIN_S, BEGIN_S + 9.9, BEGIN_S + 35):
        history.request_ended(record(ended_s), ended_s)
    found = columns(history, BEGIN_S + 45)
    assert found["answered"][-6:] == [None, 2, 0, 0, 1, 0]
    assert found["generated_tokens"][-5] == 20
    assert found["hit"][-5] == 0.25
    assert found["ttft_p50_s"][-6:-3] == [None, pytest.approx(0.5, rel=0.03), None]


def test_an_hour_later_a_sample_has_left() -> None:
    history = LiveHistory([conductor()])
    history.request_ended(record(BEGIN_S), BEGIN_S)
    last_s = BEGIN_S + (NUM_BINS - 1) * BIN_S
    assert columns(history, last_s)["answered"] == [1] + [0] * (NUM_BINS - 1)
    assert columns(history, last_s + BIN_S)["answered"] == [0] * NUM_BINS
    assert columns(history, last_s + 7 * 3600)["answered"] == [0] * NUM_BINS


def test_percentiles_are_near_the_exact_ones() -> None:
    history = LiveHistory([conductor()])
    for number in range(1, 1001):
        history.request_ended(record(BEGIN_S, ttft_s=number / 1000), BEGIN_S)
    found = columns(history, BEGIN_S)
    assert found["ttft_p50_s"][-1] == pytest.approx(0.5, rel=0.03)
    assert found["ttft_p90_s"][-1] == pytest.approx(0.9, rel=0.03)


def test_a_tenant_sees_its_own_samples_and_no_loads() -> None:
    history = LiveHistory([conductor()])
    for tenant in ("ann", "bob", "ann/salt"):
        history.request_ended(record(BEGIN_S, tenant=tenant), BEGIN_S)
    own = columns(history, BEGIN_S, "ann")
    assert own["answered"][-1] == 2
    assert not any("load" in name for name in own)
    assert columns(history, BEGIN_S)["answered"][-1] == 3
    assert columns(history, BEGIN_S, "eve")["answered"][-1] == 0


def test_memory_is_bounded_by_the_tenants_that_asked_last() -> None:
    history = LiveHistory([conductor()])
    for number in range(MAX_TENANTS + 9):
        history.request_ended(record(BEGIN_S, tenant=f"t{number}"), BEGIN_S)
    known = [columns(history, BEGIN_S, f"t{n}")["answered"][-1] for n in range(MAX_TENANTS + 9)]
    assert known == [0] * 9 + [1] * MAX_TENANTS


def test_loads_are_asked_for_once_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(live_history, "_loads", lambda _, now: asked.append(now) or (0.5, 0.25))
    history = LiveHistory([conductor()])
    for tick in range(301):
        now = BEGIN_S + tick / 10
        history.request_ended(record(now), now)  # the end of a request closes a sample, too
        history.tick(now)
    assert len(asked) == 3
    found = columns(history, BEGIN_S + 30)
    assert found["prefill_load"][-5:] == [None, 0.5, 0.5, 0.5, 0.5]
    assert found["decode_load"][-1] == 0.25
