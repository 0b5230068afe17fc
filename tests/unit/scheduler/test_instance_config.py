"""Tests that the live worker and the simulator derive the same instance settings from one
configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from test_instance import COST, LAYOUT

from moonpool.config.parse import parse_config
from moonpool.head.head import ClusterHead
from moonpool.scheduler.actions import WorkerEvent
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.types import Role
from moonpool_engine.worker.instance_boot import live_config

DRIVERS_OWN = {
    "ssd_blocks",
    "store_shared",
    "engine_tokens",
    "layer_wise_load",
    "max_repeats",
    "kept_tokens",
}
"""The settings that only a driver knows: properties of its store, its engine and its memory."""

OTHER_THAN_DEFAULT: dict[str, dict[str, Any]] = {
    "engine": {
        "chunk_tokens": 768,
        "max_sequences": 77,
        "batching": "prefill-first",
        "speculative_config": {"method": "ngram"},
    },
    "pool": {"prefix_caching": False, "eviction": "lfu", "ssd_admission": "second-use"},
    "slo": {"tbt_s": 0.123},
    "conductor": {"learning": False},
}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_both_drivers_pass_the_same_settings(num_stages: int) -> None:
    tables = {name: dict(table) for name, table in OTHER_THAN_DEFAULT.items()}
    tables["engine"] |= {
        "pipeline_parallel_size": num_stages,
        "decode_pipeline_parallel_size": num_stages,
    }
    if num_stages > 1:
        tables["hardware"] = {"cost": "roofline"}
    config = parse_config("", {"cluster": {"prefill": 1, "decode": 1}, **tables}, DEFAULTS)
    setup = ClusterHead.setup(SimpleNamespace(config=config))  # type: ignore[arg-type]
    simulation = Simulation(config, build_hardware(config))
    live = msgspec.structs.asdict(live_config(setup, num_stages, None, True))
    usual = msgspec.structs.asdict(InstanceConfig())
    for node in simulation.nodes.values():
        simulated = msgspec.structs.asdict(node.instance.config)
        different = {name for name in live if live[name] != simulated[name]}
        assert different <= DRIVERS_OWN
        assert live["micro_batches"] == num_stages
    same = {name for name in live if name not in DRIVERS_OWN and live[name] == usual[name]}
    assert same == ({"max_steps_in_flight", "micro_batches"} if num_stages == 1 else set())


def test_every_event_has_a_handler() -> None:
    instance = Instance(InstanceConfig(), LAYOUT, 8, Role.MIXED, COST, ())
    assert instance._handlers.keys() == set(get_args(WorkerEvent))
