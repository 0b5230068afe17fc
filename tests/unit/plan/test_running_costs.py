"""Tests the price of tokens, the power of a cluster, and the candidates that a limit of power
excludes."""

from __future__ import annotations

from math import inf
from typing import Any, cast

import msgspec
import pytest

from moonpool.plan.assess import Assessment
from moonpool.plan.candidate import Candidate, NodeKind, Priced
from moonpool.plan.demand import Demand, Prepared
from moonpool.plan.running_costs import cost_lines, costs_of
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.prices import parse_prices
from moonpool.studies.cluster import cluster_config

POWERS = {device.name: device.power_w for device in BUILT_IN.devices}
PRICED = Priced(parse_prices(), 327_680.0, device_power_w=POWERS)
KIND = NodeKind("H100-SXM", 8)
ONE = Candidate(KIND, NodeKind("H200", 4), 2, 1, 0, 1000, 512)
DEMAND = Demand((0.0, 1800.0), (4000, 6000), (0, 3000), (100, 100))


def prepared(**hardware: str) -> Prepared:
    config = cluster_config({"hardware": hardware} if hardware else None, {})
    return Prepared(config, DEMAND, (ONE,), cast(Any, None), "both", (), 1000)


def test_every_device_of_the_catalogue_has_a_power_and_a_price() -> None:
    for device in BUILT_IN.devices:
        assert 100.0 <= device.power_w <= 2000.0, device.name


def test_a_million_tokens_cost_what_the_hours_do() -> None:
    found = costs_of(Assessment(ONE, 20.0, ()), prepared(), PRICED)
    usd = found["usd_per_million_tokens"]  # the cluster costs 10 USD in half an hour
    assert usd["all"] == pytest.approx(1e6 * 10 / 10_200, rel=1e-4)
    assert usd["computed"] == pytest.approx(1e6 * 10 / 7_200, rel=1e-4)
    assert usd["output"] == pytest.approx(1e6 * 10 / 200, rel=1e-4)
    assert found["power_kw"] == pytest.approx((16 * 700 + 4 * 700) / 1e3)
    lines = list(cost_lines(found))
    assert any("H200 costs 4.5 USD/h" in line and "2026-05" in line for line in lines)
    assert any("100% of the trace's prompt tokens are in others" in line for line in lines)
    assert any(
        "not measured" in n
        for n in costs_of(Assessment(ONE, 20.0, ()), prepared(cost="roofline"), PRICED)["notes"]
    )
    assert not costs_of(None, prepared(), PRICED) and not list(cost_lines({}))


def test_a_cluster_above_the_power_limit_has_no_price() -> None:
    limited = msgspec.structs.replace(PRICED, max_power_w=14_000.0)
    assert limited.usd_per_h(ONE) == PRICED.usd_per_h(ONE) < inf, "14.0 kW are allowed"
    assert msgspec.structs.replace(limited, max_power_w=13_999.0).usd_per_h(ONE) == inf
    offloading = NodeKind("H100-SXM", 2, "H20", 4)
    more = msgspec.structs.replace(ONE, decode_kind=offloading)
    assert PRICED.power_w(more) == 16 * 700 + 2 * 700 + 4 * 400
    unknown = msgspec.structs.replace(PRICED, device_power_w={})
    assert unknown.power_w(ONE) == 0.0
