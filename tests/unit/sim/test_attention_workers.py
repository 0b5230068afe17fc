"""Simulated clusters read `cluster.attention` like live clusters."""

from __future__ import annotations

from math import fsum
from typing import Any

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import ConfigError
from moonpool.cost.fitted import FittedCost, OffloadParts
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.offload_cost import MeasuredOffload, OffloadCost
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.row import TraceRow

WAITS_S = 4.5
"""The time limit of requests. Answers of 200 tokens take 3 s, so requests that wait for room do not
end in time."""
PARTS = OffloadParts(
    model=((1, 0.010), (8, 0.012), (16, 0.020)),
    attention=(0.001, 1e-4, 1e-6),
    message_s=0.0005,
    cores=2,
)
ALONE = FittedCost(
    prefill=(0.01, 1e-4, 0.0, 0.0),
    decode=(0.012, 0.0005, 2e-6),
    token_bytes=1024,
    offload=PARTS,
)


def config(attention: int, cost: str = "profile.json", own_tokens: int = 0, **engine: Any) -> Any:
    tables = {
        "attention": {"own_tokens": own_tokens},
        "cluster": {"prefill": 1, "decode": 1, "attention": attention},
        "pool": {"block_tokens": 16, "dram_tokens_per_instance": 1600},
        "engine": engine,
        "hardware": {"cost": cost},
        "conductor": {"admission": "none"},
        "slo": {"ttft_s": 1e4, "tbt_s": 1e4},
    }
    return parse_config("", tables)


def test_blocks_lie_at_the_workers_and_a_request_at_one() -> None:
    alone, two = (build_hardware(config(count), ALONE) for count in (0, 2))
    assert alone.decode.num_blocks == 100
    assert two.decode.arenas == (100, 100)
    assert two.largest_request_tokens == alone.largest_request_tokens


def test_a_step_is_the_instance_without_contexts_the_messages_and_attention() -> None:
    one, two = (MeasuredOffload(ALONE, PARTS, workers, staggered=False) for workers in (1, 2))
    base_s = 0.012 + 0.0005 * 4 + 0.0005
    assert one.step_s((), 4, 1000) == pytest.approx(base_s + 0.001 + 4e-4 + 1e-3)
    assert two.step_s((), 4, 1000) == pytest.approx(base_s + 0.001 + 2e-4 + 5e-4)
    assert one.step_s((), 0, 0) == 0.0
    # Four workers on two cores take turns.
    four = MeasuredOffload(ALONE, PARTS, 4, staggered=False)
    turns_s = 2 * (0.001 + 1e-4 + 2.5e-4)
    assert four.step_s((), 4, 1000) == pytest.approx(base_s + turns_s)


def test_two_batches_overlap_where_both_sides_have_a_core() -> None:
    serial, staggered = (MeasuredOffload(ALONE, PARTS, 1, staggered=flag) for flag in (False, True))
    # equal, because 7 blocks are too few to split
    assert staggered.step_s((), 7, 9000) == serial.step_s((), 7, 9000)
    # There are 16 requests of 1,000 tokens: for half of them the model takes 12 ms and attention
    # 9.8 ms.
    around_s = 0.012 + 0.0005 * 16 + 0.0005 - 0.020
    assert staggered.step_s((), 16, 16_000) == pytest.approx(around_s + 0.024)
    assert staggered.step_s((), 16, 16_000) < serial.step_s((), 16, 16_000)
    # With long contexts, attention is the bottleneck.
    assert staggered.step_s((), 16, 64_000) == pytest.approx(around_s + 2 * (0.001 + 8e-4 + 0.032))


def test_seen_with_a_worker_a_step_is_what_it_was_seen_to_take() -> None:
    parts = msgspec.structs.replace(PARTS, seen_workers=1)
    one, two = (MeasuredOffload(ALONE, parts, workers, staggered=False) for workers in (1, 2))
    seen_s = ALONE.decode_step_s(4, 1000)
    assert one.step_s((), 4, 1000) == pytest.approx(seen_s)
    # The second batch takes half of the first batch's time for rows and contexts.
    assert two.step_s((), 4, 1000) == pytest.approx(seen_s - (4e-4 + 1e-3) / 2)
    # Two batches overlap as far as their layers do.
    staggered = MeasuredOffload(ALONE, parts, 1, staggered=True)
    saved_s = 0.020 + (0.001 + 1.6e-3 + 0.016) - 0.024
    assert staggered.step_s((), 16, 16_000) == pytest.approx(
        ALONE.decode_step_s(16, 16_000) - saved_s
    )


def test_a_profile_seen_with_workers_is_not_taken_for_one_without() -> None:
    offload = msgspec.structs.replace(PARTS, seen_workers=1)
    seen = msgspec.structs.replace(ALONE, offload=offload)
    assert isinstance(build_hardware(config(1), seen).decode.ground_truth, MeasuredOffload)
    with pytest.raises(ConfigError, match="measured with attention workers"):
        build_hardware(config(0), seen)


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 50, 1001])
@pytest.mark.parametrize("seen_workers", [0, 1, 3])
@pytest.mark.parametrize("own_tokens", [0, 6000])
def test_many_steps_take_what_each_takes(
    staggered: bool, steps: int, seen_workers: int, own_tokens: int
) -> None:
    parts = msgspec.structs.replace(PARTS, seen_workers=seen_workers)
    cost = MeasuredOffload(ALONE, parts, 1, staggered, own_tokens)
    each = fsum(cost.step_s((), 16, 10_000 + 16 * i) for i in range(steps))
    assert cost.decode_steps_s(16, 10_000, steps) == pytest.approx(each)


def test_twice_the_requests_fit_two_memories() -> None:
    rows = [
        TraceRow(arrived_s=0.0, input_tokens=512, output_tokens=200, hash_ids=(2 * i, 2 * i + 1))
        for i in range(6)
    ]
    completed = []
    for count, own_tokens in ((0, 0), (1, 0), (2, 0), (1, 1600)):
        made = config(count, own_tokens=own_tokens)
        api = msgspec.structs.replace(made.api, request_timeout_s=WAITS_S)
        made = msgspec.structs.replace(made, api=api)
        hardware = build_hardware(made, ALONE)
        simulation = Simulation(made, hardware)
        simulation.run(make_arrivals(rows, 256, 16, hardware.largest_request_tokens))
        figures = summarise(simulation, 0.0)
        completed.append(figures["completed"])
    assert completed == [2, 2, 4, 4]


def test_instances_of_a_measured_machine_share_its_memory() -> None:
    """The Conductor must predict transfers at the rate of shared memory, at which the simulated
    bytes are sent."""
    made = config(0)
    simulation = Simulation(made, build_hardware(made, ALONE))
    one, other = simulation.conductor.instances.values()
    assert one.info.address.host_id == other.info.address.host_id != ""
    apart = parse_config("", {"cluster": {"prefill": 1, "decode": 1}}, DEFAULTS)
    simulation = Simulation(apart, build_hardware(apart))
    one, other = simulation.conductor.instances.values()
    assert one.info.address.host_id != other.info.address.host_id


def test_what_an_instance_keeps_itself_is_one_memory_more() -> None:
    hardware = build_hardware(config(2, own_tokens=800), ALONE)
    assert hardware.decode.arenas == (100, 100, 50)
    assert hardware.decode.num_blocks == 250
    assert hardware.largest_request_tokens == 1600, "of one memory"
    with pytest.raises(ConfigError, match="with --cost"):
        build_hardware(config(2, "roofline", own_tokens=800))


@pytest.mark.parametrize("own_tokens", [0, 800])
def test_the_conductor_knows_that_a_request_lies_in_one_memory(own_tokens: int) -> None:
    made = config(2, own_tokens=own_tokens)
    hardware = build_hardware(made, ALONE)
    simulation = Simulation(made, hardware)
    assert simulation.conductor.instance_table.most_decode_tokens == 1600


def test_it_attends_to_its_own_while_the_worker_is_busy() -> None:
    cost = MeasuredOffload(ALONE, PARTS, 1, staggered=False, own_tokens=2000)
    base_s = 0.012 + 0.0005 * 4
    # Half of each request moves immediately, and later everything for which the worker has no room.
    assert cost.step_s((), 4, 3000) == pytest.approx(base_s + 0.0005 + 0.001 + 2e-4 + 1.5e-3)
    assert cost.step_s((), 4, 9000) == pytest.approx(base_s + 0.0005 + 0.001 + 2e-4 + 7e-3)
    two = MeasuredOffload(ALONE, PARTS, 2, staggered=False, own_tokens=2000)
    crowded_s = 1.5 * (0.001 + 4e-4 / 3 + 1e-3)  # three workers compute attention on two cores
    assert two.step_s((), 4, 3000) == pytest.approx(base_s + 0.0005 + crowded_s)
    turns = MeasuredOffload(ALONE, PARTS, 1, staggered=True, own_tokens=8000)
    half_s = 0.001 + 4e-4 + 4e-3  # the time of half a batch
    around_s = 0.012 + 0.0005 * 16 + 0.0005 - 0.020
    assert turns.step_s((), 16, 16_000) == pytest.approx(around_s + 2 * (0.012 + half_s))


def test_seen_with_memory_of_its_own_a_step_is_what_it_was_seen_to_take() -> None:
    parts = msgspec.structs.replace(PARTS, seen_workers=1, seen_own_tokens=2000)
    cost = MeasuredOffload(ALONE, parts, 1, staggered=False, own_tokens=2000)
    assert cost.step_s((), 4, 1000) == pytest.approx(ALONE.decode_step_s(4, 1000))
    without = MeasuredOffload(ALONE, parts, 1, staggered=False)
    more_s = 2e-4 + 5e-4
    assert without.step_s((), 4, 1000) == pytest.approx(ALONE.decode_step_s(4, 1000) + more_s)


@pytest.mark.parametrize("attention", [1, 2])
def test_attention_workers_have_no_ssd(attention: int) -> None:
    made = config(attention)
    pool = msgspec.structs.replace(made.pool, ssd_tokens_per_instance=16_000)
    hardware = build_hardware(msgspec.structs.replace(made, pool=pool), ALONE)
    assert (hardware.prefill.num_slots, hardware.decode.num_slots) == (1000, 0)


@pytest.mark.parametrize("decode", [0, 1])
def test_attention_workers_of_mixed_instances_are_an_error(decode: int) -> None:
    made = config(2)
    cluster = msgspec.structs.replace(made.cluster, prefill=decode, decode=decode, mixed=1)
    with pytest.raises(ConfigError, match="mixed instances cannot be simulated"):
        build_hardware(msgspec.structs.replace(made, cluster=cluster), ALONE)


@pytest.mark.parametrize("partition", ["head", "tokens"])
def test_another_partition_is_not_taken_for_one_by_request(partition: Any) -> None:
    made = config(2)
    attention = msgspec.structs.replace(made.attention, partition=partition)
    with pytest.raises(ConfigError, match=f'"{partition}" cannot be simulated'):
        build_hardware(msgspec.structs.replace(made, attention=attention), ALONE)


def test_a_profile_without_attention_workers_is_an_error() -> None:
    plain = FittedCost(prefill=ALONE.prefill, decode=ALONE.decode)
    with pytest.raises(ConfigError, match="without attention workers"):
        build_hardware(config(1), plain)


def test_devices_of_the_catalogue_attend_as_many_as_there_are_workers() -> None:
    hardware = build_hardware(config(2, "roofline"))
    truth = hardware.decode.ground_truth
    assert isinstance(truth, OffloadCost)
    own = config(2, "roofline").hardware
    assert truth.attention.num_devices == 2 * own.devices_per_node
    assert truth.num_batches == 1
    staggered = build_hardware(config(2, "roofline", staggered_decodes=True)).decode.ground_truth
    assert isinstance(staggered, OffloadCost)
    assert staggered.num_batches == 2
