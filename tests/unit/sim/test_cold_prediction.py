"""Tests the predicted TTFT of requests with a common prefix, which at most one instance has."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.cost.fitted import FittedCost
from moonpool.request_record import RequestRecord
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

BLOCK = 64
COST = FittedCost(  # has the times of a small model on one core
    prefill=(0.0126, 0.00326, 2.6e-7, 5e-7),
    decode=(0.028, 0.00125, 3.6e-6),
    mixed=(0.0039, 6.4e-6),
    token_bytes=114_688,
    control_latency_s=0.0005,
)
CLUSTERS = [
    pytest.param({"prefill": 0, "decode": 0, "mixed": 2}, id="mixed"),
    pytest.param({"prefill": 1, "decode": 1}, id="separate, without room for all"),
    pytest.param({"prefill": 2, "decode": 2}, id="separate"),
]


def meet(cluster: dict[str, int], warm: int) -> list[RequestRecord]:
    """Plays twelve requests with a common prefix of 31 blocks that arrive at once. `warm` is the
    number of instances that had the prefix before."""
    tables: dict[str, Any] = {
        "cluster": cluster,
        "engine": {"chunk_tokens": 512, "max_sequences": 128},
        "pool": {"block_tokens": BLOCK, "dram_tokens_per_instance": 16_384},
    }
    config = parse_config("", tables)
    records: list[RequestRecord] = []
    simulation = Simulation(config, build_hardware(config, COST))
    prefix, num_tokens = private_keys(1, 31 * BLOCK, BLOCK), 2040
    times_s = [float(number) for number in range(warm)] + [60.0 + n * 0.02 for n in range(12)]
    arrivals = [
        Arrival(at_s, num_tokens, 64, prefix + private_keys(100 + number, num_tokens, BLOCK)[31:])
        for number, at_s in enumerate(times_s)
    ]
    simulation.run(arrivals, records.append)
    return [record for record in records if record.arrived_s >= 60.0]


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_predicted_ttft_is_near_the_real_one(cluster: dict[str, int], warm: int) -> None:
    """Both times include the time that a request has waited for room."""
    records = meet(cluster, warm)
    assert len(records) == 12 and {record.outcome for record in records} == {"stop"}
    predicted = [record.expected_ttft_s or 0.0 for record in records]
    real = [record.ttft_s or 0.0 for record in records]
    assert 0.6 < mean(predicted) / mean(real) < 1.2
    worst = max(seen / foretold for seen, foretold in zip(real, predicted, strict=True))
    assert worst < 4.0, "the prompts of one step end together"


@pytest.mark.parametrize("slower", [2.0, 3.0])
@pytest.mark.parametrize("cluster", [CLUSTERS[0], CLUSTERS[2]])
def test_a_cold_cluster_of_a_slow_machine_is_known_by_its_first_prompts(
    cluster: dict[str, int], slower: float
) -> None:
    """An instance computes prompts two or three times slower than its profile says. Twelve prompts
    come one by one. Without the correction, the prediction for each would follow the profile."""
    tables: dict[str, Any] = {"cluster": cluster, "pool": {"block_tokens": BLOCK}}
    config = parse_config("", tables)
    records: list[RequestRecord] = []
    hardware = build_hardware(config, COST, prefill_error=1.0 / slower)
    simulation = Simulation(config, hardware)
    lengths = [400 + 617 * number % 2000 for number in range(12)]
    simulation.run(
        [
            Arrival(8.0 * number, length, 32, private_keys(number, length, BLOCK))
            for number, length in enumerate(lengths)
        ],
        records.append,
    )
    predicted = [record.expected_ttft_s or 0.0 for record in records]
    real = [record.ttft_s or 0.0 for record in records]
    assert mean(predicted[:1]) < 0.6 * mean(real[:1])
    assert 0.65 < mean(predicted[1:]) / mean(real[1:]) < 1.2
