"""One simulated run of Mooncake's cluster, or of vLLM on the same nodes, by the simulator's
defaults, which are the paper's, and an experiment's changes.

Owns no experiment and no constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import structs

from moonpool.config.parse import parse_config
from moonpool.sim.hardware.build import Hardware, build_hardware
from moonpool.sim.hardware.calibrated import DEVICE, NUM_DEVICES, SHAPE
from moonpool.sim.hardware.node_cost import kv_capacity_tokens
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.row import TraceRow
from papers.constants import (
    MOONCAKE_QUICK_RATE_STEPS,
    MOONCAKE_RATE_STEPS,
    PAPERS_DEFAULTS,
    RATE_SPEEDS,
    VLLM_CHUNK_TOKENS,
    VLLM_PROMPT_TOKENS,
    VLLM_SEQUENCES,
    device_of,
    shape_of,
)
from papers.mooncake.workload import MooncakeWorkload
from papers.options import Options

Overrides = dict[str, dict[str, Any]]
System = Literal["Mooncake", "vLLM", "vLLM prefix caching", "vLLM chunked prefill"]
SYSTEMS: tuple[System, ...] = (
    "Mooncake",
    "vLLM",
    "vLLM prefix caching",
    "vLLM chunked prefill",
)


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A finished run: its figures, with the names of `simulate --json`, and its other results."""

    simulation: Simulation
    figures: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        """Mean."""
        return self.simulation.collector.ttft_s.mean

    @property
    def prefill_s(self) -> float:
        """Mean seconds that a node's accelerators spent on a prompt."""
        return self.simulation.collector.prefill_compute_s.mean

    @property
    def hit_ratio(self) -> float:
        found = self.simulation.collector
        return found.hit_tokens / max(found.input_tokens, 1)

    @property
    def completed_share(self) -> float:
        found = self.simulation.collector
        return found.num_completed / max(found.num_requests, 1)

    def share_within(self, tbt_s: float) -> float:
        """The share of all requests that completed with a TBT of at most `tbt_s`."""
        top = self.simulation.collector.tbt_top10_mean_s
        # A one-token answer has no gap to exceed anything.
        without = self.simulation.collector.num_completed - top.count
        within = top.share_up_to(tbt_s) * top.count + without
        return within / max(self.simulation.collector.num_requests, 1)

    def utilisation(self, role: str) -> float:
        share: float = self.figures["utilisation"][role]
        return share


def cluster(prefill: int, decode: int, **conductor: Any) -> Overrides:
    """Returns Mooncake's cluster with this many prefill and decode nodes. By default no request is
    refused, and none waits for a decode batch, because the paper's systems have no such wait."""
    return {
        "cluster": {"prefill": prefill, "decode": decode, "mixed": 0},
        "conductor": {"admission": "none", "decode_wait": False} | conductor,
    }


def system(name: System, num_nodes: int) -> Overrides:
    """Returns Mooncake with half of the nodes for each role, or vLLM v0.5.1 with one instance per
    node: whole prompts before decodes, or chunks. vLLM's cached blocks are in the accelerators'
    memory."""
    if name == "Mooncake":
        return cluster(num_nodes // 2, num_nodes - num_nodes // 2)
    chunked = name == "vLLM chunked prefill"
    capacity = kv_capacity_tokens(device_of(DEVICE), shape_of(SHAPE), NUM_DEVICES)
    return {
        "cluster": {"prefill": 0, "decode": 0, "mixed": num_nodes},
        "conductor": {"admission": "none", "placement": "load-balancing"},
        "pool": {
            "dram_tokens_per_instance": capacity,
            "prefix_caching": name == "vLLM prefix caching",
        },
        "engine": {
            "batching": "fixed-chunks" if chunked else "prefill-first",
            "chunk_tokens": VLLM_CHUNK_TOKENS if chunked else VLLM_PROMPT_TOKENS,
            "max_sequences": VLLM_SEQUENCES,
        },
    }


def serve(
    workload: MooncakeWorkload,
    overrides: Overrides,
    seed: int,
    speed: float = 1.0,
    *,
    nic_bytes_per_s: float | None = None,
    layer_wise: bool = True,
    watch: Callable[[Simulation], None] | None = None,
) -> ClusterRun:
    """Serves the workload, replayed `speed` times faster. `watch` is given the simulation before it
    runs."""
    config = parse_config("", overrides, PAPERS_DEFAULTS)
    hardware = build_hardware(config)
    if nic_bytes_per_s is not None:
        hardware = with_nic(hardware, nic_bytes_per_s)
    simulation = Simulation(config, hardware, SimulationSettings(seed=seed, layer_wise=layer_wise))
    if watch is not None:
        watch(simulation)
    rows = faster(workload.rows, speed)
    simulation.run(
        make_arrivals(
            rows, workload.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens
        )
    )
    return ClusterRun(simulation, summarise(simulation, 0.0))


def speed_with(options: Options, measure: Callable[[float], float], wanted: float) -> float:
    """Returns the replay speed at which a figure that grows with the speed reaches the wanted
    value, found by bisection."""
    low, high = RATE_SPEEDS
    for step in range(MOONCAKE_QUICK_RATE_STEPS if options.quick else MOONCAKE_RATE_STEPS):
        options.progress(f"the rate, step {step + 1}")
        middle = (low + high) / 2
        if measure(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def with_nic(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """Returns the cluster with another network at all nodes, which the Conductor knows."""
    prefill, decode, mixed = (
        replace(
            part,
            nic_bytes_per_s=bytes_per_s,
            estimate=structs.replace(part.estimate, network_bytes_per_s=bytes_per_s),
        )
        for part in (hardware.prefill, hardware.decode, hardware.mixed)
    )
    return replace(hardware, prefill=prefill, decode=decode, mixed=mixed)


def faster(rows: Iterable[TraceRow], speed: float) -> Iterable[TraceRow]:
    if speed == 1.0:
        return rows
    return (structs.replace(row, arrived_s=row.arrived_s / speed) for row in rows)


VLLM_INPUTS = (
    (
        f"vLLM: an instance a node, the shortest predicted queue first; {VLLM_SEQUENCES} "
        f"sequences; prompts first and whole, or chunks of {VLLM_CHUNK_TOKENS} tokens with all "
        "decodes: the defaults of the version named, the paper prints no setting"
    ),
    "vLLM's prefix cache is what its accelerators' memory holds beside the weights, 1.3 M tokens",
)
