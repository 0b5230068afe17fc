"""Tests that a simulation keeps no data of ended requests, once its bounded histories are full."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from moonpool.conductor.admission import sharing_forecast
from moonpool.conductor.forecast import estimators
from moonpool.conductor.placement import prefetching
from moonpool.conductor.waiting import room_forecast
from moonpool.config.parse import parse_config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

NUM_REQUESTS = 400
BLOCK = 256


def test_no_object_is_left_of_a_request_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, bound in (
        (prefetching, "MAX_WAITING_BLOCKS"),
        (sharing_forecast, "MAX_BLOCKS"),
        (estimators, "MAX_PREFIXES"),
        (room_forecast, "MEMORY_ANSWERS"),
    ):
        monkeypatch.setattr(module, bound, 16)
    cluster = {"prefill": 1, "decode": 1}
    pool = {"dram_tokens_per_instance": 24 * BLOCK}
    config = parse_config("", {"cluster": cluster, "pool": pool}, DEFAULTS)
    simulation = Simulation(config, build_hardware(config), SimulationSettings(sample_s=60.0))
    counts: list[int] = []

    def arrivals() -> Iterator[Arrival]:
        for n in range(NUM_REQUESTS):
            if n in (NUM_REQUESTS // 2, NUM_REQUESTS - 1):
                gc.collect()
                counts.append(len(gc.get_objects()))
            yield Arrival(n * 0.5, 900, 3 + n % 5, private_keys(n, 900, BLOCK))

    simulation.run(arrivals())
    assert simulation.collector.num_effective == NUM_REQUESTS
    middle, last = counts
    assert last - middle < NUM_REQUESTS // 20
