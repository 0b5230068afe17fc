"""Runs prefill on one kind of node and decode on another."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config, ConfigError
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import NodeHardware, build_hardware
from moonpool.sim.report.page import describe_cluster
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate


def config(admission: str = "early", **hardware: Any) -> Config:
    cluster = {"prefill": 2, "decode": 2}
    hardware = {"cost": "roofline"} | hardware
    conductor = {"admission": admission}
    tables = {"hardware": hardware, "cluster": cluster, "conductor": conductor}
    return parse_config("", tables, DEFAULTS)


def sizes(node: NodeHardware) -> tuple[object, ...]:
    """Returns the configuration without the ground truth, to which the estimate is fitted."""
    return (node.estimate, node.nic_bytes_per_s, node.pcie_bytes_per_s, node.engine_tokens)


def test_each_role_has_its_own() -> None:
    both = build_hardware(config(device="H100-SXM", decode_device="H20", decode_devices_per_node=4))
    h100 = build_hardware(config(device="H100-SXM"))
    h20 = build_hardware(config(device="H20", devices_per_node=4))
    assert sizes(both.prefill) == sizes(h100.prefill)
    assert sizes(both.decode) == sizes(h20.decode) != sizes(h100.decode)
    assert both.layout == h20.layout
    assert both.decode.engine_tokens < both.prefill.engine_tokens


def test_groups_are_of_prefill_nodes_only() -> None:
    grouped = build_hardware(
        config(device="H100-SXM", decode_device="H20", nodes_per_prefill=2, parallelism="cpp")
    )
    assert sizes(grouped.decode) == sizes(build_hardware(config(device="H20")).decode)
    assert grouped.prefill.ground_truth.num_stages == 2


def test_stages_are_nodes_of_a_pipeline_and_have_one_key_live_and_simulated() -> None:
    """`[engine]` of a live instance must make the same group as `[hardware]`."""
    engine = {"pipeline_parallel_size": 2, "decode_pipeline_parallel_size": 3}
    hardware = {"cost": "roofline", "device": "H100-SXM"}
    staged_config = parse_config("", {"engine": engine, "hardware": hardware}, DEFAULTS)
    staged = build_hardware(staged_config)
    grouped = build_hardware(config(device="H100-SXM", nodes_per_prefill=2, parallelism="cpp"))
    assert sizes(staged.prefill) == sizes(grouped.prefill)
    nodes = (staged.prefill, staged.mixed, staged.decode)
    assert [node.ground_truth.num_stages for node in nodes] == [2, 2, 3]
    words = describe_cluster(staged_config)
    assert "prefill: 2 such nodes, CPP" in words and "decode: 3 such nodes, CPP" in words
    engine["pipeline_parallel_size"] = 1
    changes = {"engine": engine, "conductor": {"role_balance": "switch"}}
    switching = parse_config("", changes, DEFAULTS)
    with pytest.raises(ConfigError, match='"switch" cannot be simulated'):
        build_hardware(switching)


def test_ranks_are_nodes_that_share_out_every_layer() -> None:
    """The configuration keys are those of a live instance. Every step includes the messages between
    the ranks."""
    engine = {"tensor_parallel_size": 4, "decode_tensor_parallel_size": 2}
    hardware = {"cost": "roofline", "device": "H100-SXM"}
    sharded = build_hardware(parse_config("", {"engine": engine, "hardware": hardware}, DEFAULTS))
    grouped = build_hardware(config(device="H100-SXM", nodes_per_prefill=4, parallelism="tp"))
    assert sizes(sharded.prefill) == sizes(grouped.prefill)
    assert [n.ground_truth.num_stages for n in (sharded.prefill, sharded.decode)] == [1, 1]
    one, two = (h.decode.ground_truth.step_s((), 64, 64 * 4096) for h in (grouped, sharded))
    assert two > 0.5 * one
    assert sharded.decode.engine_tokens == 2 * grouped.decode.engine_tokens


def test_the_same_named_twice_is_one_kind() -> None:
    named = build_hardware(config(device="H20", decode_device="H20"))
    assert sizes(named.decode) == sizes(build_hardware(config(device="H20")).decode)
    assert "(decode:" not in describe_cluster(config(device="H20", decode_device="H20"))
    assert "(decode: 8" in describe_cluster(config(device="H20", decode_device="H100-SXM"))


def test_a_calibrated_cost_holds_for_its_own_device_only() -> None:
    wrong = parse_config("", {"hardware": {"decode_device": "H20"}}, DEFAULTS)
    with pytest.raises(ConfigError, match=r'use hardware.cost = "roofline"$'):
        build_hardware(wrong)


def test_decode_on_faster_memory_answers_faster() -> None:
    gaps = []
    for decode_device in ("A40", "H200"):
        settings = config(
            "none", device="H100-SXM", decode_device=decode_device, decode_devices_per_node=8
        )
        hardware = build_hardware(settings)
        simulation = Simulation(settings, hardware)
        rows = generate(BUILT_IN["conversation"], num_requests=60, seed=2)
        arrivals = make_arrivals(rows, BLOCK_TOKENS, 256, hardware.largest_request_tokens)
        simulation.run(arrivals)
        assert simulation.collector.num_completed == 60
        gaps.append(simulation.collector.gap_s.quantile(0.5))
    assert gaps[0] > 2 * gaps[1]
