"""Measures the effect of prefetching from the SSD on generated sessions, simulated with and without
it.

Simulated figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moonpool.config.parse import parse_config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate

WORKLOADS = ("jobs", "agents", "conversation")
"""Sessions with regular pauses, and sessions whose rate of return falls with time."""
SSD_TOKENS = 20_000_000


def bench_prefetch(
    workloads: Sequence[str],
    requests: int,
    rate_rps: float,
    dram_tokens: int,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Sizes are per instance; there are 4 prefill and 2 decode instances. Raises TraceError."""
    rows: list[dict[str, Any]] = []
    for name in workloads:
        for prefetch in (False, True):
            row = _run(name, requests, rate_rps, dram_tokens, prefetch)
            rows.append({"workload": name, "prefetch": prefetch, **row})
            echo(f"{name}, prefetch {'on' if prefetch else 'off'}: {row}")
    sizes = {"requests": requests, "rate_rps": rate_rps, "dram_tokens": dram_tokens}
    return {**sizes, "ssd_tokens": SSD_TOKENS, "rows": rows}


def _run(
    name: str, requests: int, rate_rps: float, dram_tokens: int, prefetch: bool
) -> dict[str, float]:
    tables: dict[str, dict[str, Any]] = {
        "cluster": {"prefill": 4, "decode": 2},
        "conductor": {"admission": "none", "prefetch": prefetch},
        "pool": {
            "dram_tokens_per_instance": dram_tokens,
            "ssd_tokens_per_instance": SSD_TOKENS,
        },
    }
    config = parse_config("", tables, DEFAULTS)
    hardware = build_hardware(config)
    simulation = Simulation(config, hardware)
    rows = generate(BUILT_IN[name], num_requests=requests, seed=1, rate_rps=rate_rps)
    sizes = (BLOCK_TOKENS, config.pool.block_tokens, hardware.largest_request_tokens)
    simulation.run(make_arrivals(rows, *sizes))
    found = summarise(simulation, 0.0)
    cache, ssd = found["cache"], found["ssd"]
    return {
        "hit_ratio": cache["hit_ratio"],
        "loaded_share": round(cache["loaded_tokens"] / max(cache["input_tokens"], 1), 4),
        "mean_ttft_s": found["ttft_s"]["mean"],
        "p99_ttft_s": found["ttft_s"]["p99"],
        "prefetched_blocks": ssd["prefetched_blocks"],
        "used_blocks": ssd["used_prefetched_blocks"],
        "wasted_blocks": ssd["wasted_prefetched_blocks"],
    }
