"""Simulated tenants: a flood of one leaves the other's time to first token."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from moonpool.config import parse_config
from moonpool.request_record import RequestRecord
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

BLOCK = 256


def arrivals(
    tenant: str, number: int, gap_s: float, num_tokens: int, **known: Any
) -> list[Arrival]:
    first = sum(tenant.encode()) * 10_000  # no prompt has a prefix of another
    return [
        Arrival(
            n * gap_s, num_tokens, 20, private_keys(first + n, num_tokens, BLOCK), tenant, **known
        )
        for n in range(number)
    ]


def ttfts(requests: list[Arrival]) -> dict[str, list[float]]:
    """Seconds to the first token by tenant. Nobody is refused."""
    found: dict[str, list[float]] = {}

    def note(record: RequestRecord) -> None:
        assert record.ttft_s is not None
        found.setdefault(record.tenant, []).append(record.ttft_s)

    settings: dict[str, Any] = {
        "cluster": {"prefill": 1, "decode": 2},
        "conductor": {"admission": "none"},
        "engine": {"chunk_tokens": 512},
    }
    config = parse_config("", settings, DEFAULTS)
    simulation = Simulation(config, build_hardware(config), on_end=note)
    simulation.run(sorted(requests, key=lambda arrival: arrival.arrived_s))
    assert sum(map(len, found.values())) == len(requests)
    return found


@pytest.mark.parametrize("num_tokens", [2000, 8000])
def test_a_flood_of_one_tenant_leaves_the_others_time_to_first_token(num_tokens: int) -> None:
    small = arrivals("small", 30, 4.0, num_tokens)
    flood = arrivals("flood", 120, 0.5, 16_000)
    alone = mean(ttfts(small)["small"])
    both = ttfts([*small, *flood])
    assert mean(both["small"]) < 1.2 * alone
    assert mean(both["flood"]) > 20 * alone, "the flood was no flood"


def test_an_urgent_request_does_not_wait_for_prompts_of_its_own_tenant() -> None:
    urgent = arrivals("urgent", 30, 4.0, 2000)
    alone = mean(ttfts(urgent)["urgent"])
    flood = [replace(each, tenant="urgent", priority=7) for each in arrivals("f", 120, 0.5, 16_000)]
    both = ttfts([*urgent, *flood])["urgent"]
    assert len(both) == 150
    assert mean(sorted(both)[:30]) < 1.2 * alone
    assert mean(sorted(both)[30:]) > 20 * alone
