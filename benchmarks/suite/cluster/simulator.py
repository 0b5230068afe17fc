"""Measures the cost of a simulation: time and memory by the number of instances and of requests.

Each size runs in a separate process, so that its memory is separate (`python -m
benchmarks.suite.cluster.simulator INSTANCES REQUESTS`). The workload is generated while it runs,
conversation-like, at the load per instance of Mooncake's conversation trace on 16 of them. Half of
the instances prefill.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkout import ROOT
from benchmarks.errors import BenchError
from moonpool.config.parse import parse_config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.row import TraceRow

RPS_PER_INSTANCE = 3.4 / 16
NUM_MARKS = 8


def bench_simulator(sizes: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each (instances, requests) when they are known. Raises BenchError."""
    for instances, requests in sizes:
        command = [
            sys.executable,
            "-m",
            "benchmarks.suite.cluster.simulator",
            str(instances),
            str(requests),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise BenchError(f"{instances} instances, {requests} requests: {last[0]}")
        yield msgspec.json.decode(done.stdout)


def run_one(instances: int, requests: int) -> dict[str, Any]:
    """Runs one simulation in this process."""
    overrides = {
        "cluster": {"prefill": instances // 2, "decode": instances - instances // 2},
        "pool": {"block_tokens": BLOCK_TOKENS},
    }
    config = parse_config("", overrides, DEFAULTS)
    hardware = build_hardware(config)
    simulation = Simulation(config, hardware)
    rows = generate(
        BUILT_IN["conversation"],
        num_requests=requests,
        seed=0,
        rate_rps=RPS_PER_INSTANCE * instances,
    )
    marks: list[dict[str, Any]] = []
    began_s = time.perf_counter()
    watched = _watched(rows, requests, simulation, marks)
    simulation.run(
        make_arrivals(watched, BLOCK_TOKENS, BLOCK_TOKENS, hardware.largest_request_tokens)
    )
    wall_s = time.perf_counter() - began_s
    found = simulation.collector
    assert found.num_requests == requests
    return {
        "instances": instances,
        "requests": requests,
        "wall_s": round(wall_s, 2),
        "us_per_request": round(wall_s / requests * 1e6, 1),
        "events": simulation.clock.num_run,
        "us_per_event": round(wall_s / simulation.clock.num_run * 1e6, 2),
        "simulated_s": round(simulation.last_end_s, 1),
        "output_tokens": found.output_tokens,
        "effective": found.num_effective,
        "rejected": sum(found.rejected.values()),
        "failed": found.num_failed,
        "peak_mib": _memory_mib("VmHWM"),
        "marks": marks,
    }


def _watched(
    rows: Iterator[TraceRow], total: int, simulation: Simulation, marks: list[dict[str, Any]]
) -> Iterator[TraceRow]:
    """Notes the memory, and what it is used for, from time to time."""
    every = max(total // NUM_MARKS, 1)
    for number, row in enumerate(rows, start=1):
        if number % every == 0:
            nodes = simulation.nodes.values()
            marks.append(
                {
                    "arrived": number,
                    "memory_mib": _memory_mib("VmRSS"),
                    "in_flight": len(simulation.conductor.requests),
                    "cached_blocks": sum(node.instance.pool.num_cached for node in nodes),
                }
            )
        yield row


def _memory_mib(field: str) -> int:
    """Returns the memory of this process, as Linux tells; 0 where Linux does not."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1024
    return 0


if __name__ == "__main__":
    found = run_one(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(msgspec.json.encode(found).decode())
    sys.stdout.flush()
    os._exit(0)  # giving gigabytes back piece by piece would take longer than the run's last minute
