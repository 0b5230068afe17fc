"""Tests the shares of simulated tenants, for as long as answers run, in clusters of several
shapes."""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any, NamedTuple

import pytest

from moonpool.conductor.actions import ConductorAction, ConductorEvent, Deliver
from moonpool.config.parse import parse_config
from moonpool.cost.fitted import FittedCost
from moonpool.request_record import RequestRecord
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

BLOCK = 64
COST = FittedCost(
    prefill=(0.004, 0.0002, 1e-9, 2e-9),
    decode=(0.004, 0.0005, 2e-7),
    token_bytes=1024,
    control_latency_s=0.0005,
)
CHUNK_S = 0.11
"""The time of a step that computes a chunk of 512 tokens beside some answers."""
SEPARATE: dict[str, int] = {"prefill": 2, "decode": 2}
MIXED: dict[str, int] = {"prefill": 0, "decode": 0, "mixed": 2}
STATED = {"ttft_s": 30.0, "tbt_s": 0.5}
CLUSTERS = [
    pytest.param(SEPARATE, id="separate"),
    pytest.param(MIXED, id="mixed", marks=pytest.mark.long),
]


def asks(
    tenant: str,
    number: int,
    gap_s: float,
    num_tokens: int,
    first_s: float = 0.0,
    prompt_tokens: int = 24,
    priority: int = 0,
) -> list[Arrival]:
    """Makes requests for answers of `num_tokens`. No two prompts share a prefix."""
    start = sum(tenant.encode()) * 1_000_000 + int(first_s * 1000) * 100
    keys = [private_keys(start + n, prompt_tokens, BLOCK) for n in range(number)]
    return [
        Arrival(first_s + n * gap_s, prompt_tokens, num_tokens, keys[n], tenant, priority)
        for n in range(number)
    ]


def flood(tenant: str, first_s: float = 0.0, **known: Any) -> list[Arrival]:
    """Makes more requests for long answers than the pool holds, all at the same time."""
    values = {"number": 60, "gap_s": 0.01, "num_tokens": 7000} | known
    return asks(tenant, first_s=first_s, **values)


class Found(NamedTuple):
    records: dict[str, list[RequestRecord]]  # records by tenant, in order of arrival
    tokens: list[tuple[float, str, int]]  # (time of delivery, tenant, number of tokens)
    num_pauses: int

    def ttfts(self, tenant: str) -> list[float]:
        """Returns the TTFTs of the tenant's requests, in order of arrival. Asserts that all were
        answered."""
        outcomes = Counter(record.outcome for record in self.records[tenant])
        assert outcomes == {"stop": len(self.records[tenant])}
        return [record.ttft_s or 0.0 for record in self.records[tenant]]

    def shares(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Returns each tenant's part of the tokens in an interval of time."""
        found = Counter[str]()
        for at_s, tenant, number in self.tokens:
            if begin_s <= at_s < end_s:
                found[tenant] += number
        return {tenant: number / found.total() for tenant, number in found.items()}


def run(
    *parts: list[Arrival],
    cluster: dict[str, int] = SEPARATE,
    shares: dict[str, float] | None = None,
    admission: str = "goodput",
    slo: dict[str, float] | None = None,
    timeout_s: float = 600.0,
) -> Found:
    """Simulates two decode instances of 8192 tokens of KVCache each. Without `slo`, no request
    states an SLO."""
    tables: dict[str, Any] = {
        "cluster": cluster,
        "conductor": {"admission": admission},
        "pool": {"block_tokens": BLOCK, "dram_tokens_per_instance": 8192},
        "api": {"request_timeout_s": timeout_s},
        "slo": slo or {},
    }
    config = parse_config("", tables)
    records: list[RequestRecord] = []
    simulation = Simulation(
        config,
        build_hardware(config, COST),
        SimulationSettings(tenant_share=shares or {}, capped_answers=True),
    )
    tokens: list[tuple[float, str, int]] = []
    conductor = simulation.conductor
    handle = conductor.handle

    def noted(event: ConductorEvent, now: float) -> list[ConductorAction]:
        tenants = {name: one.request.tenant for name, one in conductor.requests.items()}
        actions = handle(event, now)
        for action in actions:
            if isinstance(action, Deliver):
                tokens.append((now, tenants[action.request_id], len(action.tokens)))
        return actions

    conductor.handle = noted  # type: ignore[method-assign]
    arrivals = [arrival for part in parts for arrival in part]
    simulation.run(sorted(arrivals, key=lambda arrival: arrival.arrived_s), records.append)
    conductor.validate()
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.arrived_s):
        by_tenant.setdefault(record.tenant, []).append(record)
    return Found(by_tenant, tokens, conductor.num_pauses)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [SEPARATE, MIXED], ids=["separate", "mixed"])
@pytest.mark.parametrize(
    ("admission", "slo"),
    [
        ("goodput", None),
        pytest.param("goodput", STATED, marks=pytest.mark.long),
        pytest.param("none", STATED, marks=pytest.mark.long),
        pytest.param("early", STATED, marks=pytest.mark.long),
    ],
)
def test_long_answers_of_one_tenant_leave_another_its_short_ones(
    cluster: dict[str, int], admission: str, slo: dict[str, float] | None
) -> None:
    """Every short request must be answered, about as soon as without the long answers, and no long
    answer may end with an error before its deadline."""
    small = asks("small", 75, 1.0, 8, first_s=5.0)
    known: dict[str, Any] = {"cluster": cluster, "admission": admission, "slo": slo}
    alone = mean(run(small, **known).ttfts("small"))
    both = run(small, flood("flood"), **known)
    assert mean(both.ttfts("small")) < 2 * alone
    assert max(both.ttfts("small")) < 2 * alone + CHUNK_S, "the step under way"
    begun = [record for record in both.records["flood"] if record.attempts]
    assert {record.outcome for record in begun} <= {"stop", "deadline"}
    alone_flood = run(flood("flood"), **known).records["flood"]
    ended = [sum(r.outcome == "stop" for r in some) for some in (begun, alone_flood)]
    assert ended[0] > 0.9 * ended[1], "the flood has the rest"
    assert both.num_pauses > 20, "the flood was no flood"


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.long), 3.0])
def test_two_tenants_that_flood_share_by_weight(cluster: dict[str, int], weight: float) -> None:
    parts = [flood(name, at_s, num_tokens=1500) for name, at_s in (("a", 0.0), ("b", 5.0))]
    found = run(*parts, cluster=cluster, shares={"a": weight}, timeout_s=80.0)
    share = found.shares(15.0, 60.0)["a"]
    assert share == pytest.approx(weight / (weight + 1.0), abs=0.06)
    assert found.num_pauses < 120, "they do not take the room from each other in turn"


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_three_tenants_share_and_a_fourth_is_served_beside_them(cluster: dict[str, int]) -> None:
    begins_s = {"a": 0.0, "b": 5.0, "c": 5.0}
    parts = [flood(name, at_s, num_tokens=1500) for name, at_s in begins_s.items()]
    small = asks("small", 40, 1.0, 8, first_s=20.0)
    found = run(*parts, small, cluster=cluster, timeout_s=80.0)
    shares = found.shares(15.0, 60.0)
    assert all(0.27 < shares[name] < 0.4 for name in "abc"), shares
    alone = mean(run(small, cluster=cluster).ttfts("small"))
    assert mean(found.ttfts("small")) < 2 * alone


@pytest.mark.long
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_tenant_alone_uses_all_and_one_that_returns_has_its_share(
    cluster: dict[str, int],
) -> None:
    first, again = (asks("small", 15, 0.5, 8, first_s=at_s) for at_s in (5.0, 100.0))
    found = run(flood("flood"), first, again, cluster=cluster)
    alone = run(flood("flood"), cluster=cluster)
    assert found.shares(50.0, 100.0) == {"flood": 1.0}
    rates = [
        sum(number for at_s, name, number in one.tokens if 50.0 < at_s < 100.0)
        for one in (found, alone)
    ]
    assert rates[0] > 0.95 * rates[1], "nothing is kept free for a tenant that is away"
    assert alone.num_pauses == 0
    usual = mean(run(first, cluster=cluster).ttfts("small"))
    assert mean(found.ttfts("small")[15:]) < 2 * usual


@pytest.mark.long
def test_no_answer_gives_way_to_a_less_urgent_one() -> None:
    """A request of a better or equal priority must start immediately, and a request of a worse
    priority must wait."""
    parts = [asks(f"p{p}", 20, 1.0, 8, 5.0 + p / 10, priority=p) for p in (-1, 0, 1)]
    found = run(flood("flood"), *parts, admission="none")
    alone = mean(run(parts[0]).ttfts("p-1"))
    assert mean(found.ttfts("p-1")) < 2 * alone
    assert mean(found.ttfts("p0")) < 2 * alone
    assert mean(found.ttfts("p1")) > 10 * alone


def test_a_long_prompt_waits_for_part_of_its_time_at_most() -> None:
    """The request needs more than half of its tenant's share."""
    large = asks("large", 20, 3.0, 8, first_s=5.0, prompt_tokens=4000)
    found = run(flood("flood"), large, slo=STATED)
    assert max(found.ttfts("large")) < 30.0 / 4
