"""Measures the effect of the rules of programs on agents: makespans compared with those of policies
that see only single calls.

Generated programs like Mooncake's tool agents run in a closed loop: a call starts when the previous
one has ended and its tool has run, and a refused call is tried again as clients do. A program that
its client gave up counts as one that took longer than all others. Load 1 is the rate at which the
programs' prefills and decodes would just keep the instances busy if no token were computed twice
(see `capacity_rps`). Simulated figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from moonpool.config.parse import parse_config
from moonpool.gc_tuning import rare_collections
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import BUILT_IN, TOOLAGENT
from moonpool.trace.generate import BLOCK_TOKENS, expected_turns, generate
from moonpool.trace.profile import NUM_CLASSES, GeneratorProfile

assert TOOLAGENT.tools is not None
TOOL_PROGRAMS = replace(
    TOOLAGENT,
    name="tool-programs",
    closed_loop=True,
    first_continue_share=(0.0,) * NUM_CLASSES,
    continue_share=(0.0,),
    tools=replace(TOOLAGENT.tools, share=0.92),
)
"""Tool agents whose sessions are whole programs: 12.5 calls in the mean, all but the last with a
tool."""
WORKLOADS: dict[str, GeneratorProfile] = {
    TOOL_PROGRAMS.name: TOOL_PROGRAMS,
    **{name: BUILT_IN[name] for name in ("agents", "coding-agents")},
}
POLICIES: dict[str, dict[str, Any]] = {
    "calls, goodput": {"programs": "off", "admission": "goodput"},
    "calls, none": {"programs": "off", "admission": "none"},
    "programs": {"programs": "named", "admission": "goodput"},
}
"""The best call-level policies of moonpool, and the rules of programs."""


def bench_programs(
    workload: str,
    instances: int,
    loads: Sequence[float],
    programs: int,
    kv_tokens: int,
    capacity_rps: float,
    policies: Sequence[str],
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """`capacity_rps`: calls per second of one instance at load 1. Raises TraceError."""
    rows: list[dict[str, Any]] = []
    for load in loads:
        best: dict[str, float] = {}
        for policy in policies:
            rate_rps = load * capacity_rps * instances
            row = _run(WORKLOADS[workload], instances, rate_rps, programs, kv_tokens, policy)
            rows.append({"load": load, "policy": policy, **row})
            echo(f"load {load:g}, {policy}: {row}")
            if policy != "programs":
                for name in ("p50_s", "p90_s"):
                    best[name] = min(best.get(name, float("inf")), row[name])
            elif best:
                gains = {name: round(best[name] / row[name], 2) for name in best}
                rows[-1]["times_better"] = gains
                echo(f"load {load:g}: the best call-level policy takes {gains} times as long")
    sizes = {"instances": instances, "programs": programs, "kv_tokens": kv_tokens}
    return {"workload": workload, "capacity_rps": capacity_rps, **sizes, "rows": rows}


def _run(
    profile: GeneratorProfile,
    instances: int,
    rate_rps: float,
    programs: int,
    kv_tokens: int,
    policy: str,
) -> dict[str, float]:
    tables: dict[str, dict[str, Any]] = {
        "cluster": {"prefill": 0, "decode": 0, "mixed": instances},
        "conductor": POLICIES[policy],
        "pool": {"dram_tokens_per_instance": kv_tokens},
    }
    config = parse_config("", tables, DEFAULTS)
    hardware = build_hardware(config)
    simulation = Simulation(config, hardware)
    calls = round(programs * expected_turns(profile))
    rows = generate(profile, num_requests=calls, seed=1, rate_rps=rate_rps, closed_loop=True)
    sizes = (BLOCK_TOKENS, config.pool.block_tokens, hardware.largest_request_tokens)
    with rare_collections():
        simulation.run(make_arrivals(rows, *sizes))
    found, ended = summarise(simulation, 0.0), simulation.clients.figures
    return {
        "programs": len(ended),
        "failed": ended.num_failed,
        "retries": ended.num_retries,
        "p50_s": found["programs"]["makespan_with_failed_s"]["p50"],
        "p90_s": found["programs"]["makespan_with_failed_s"]["p90"],
        "mean_s": found["programs"]["makespan_s"]["mean"],
        "lost_p50_s": found["programs"]["lost_s"]["p50"],
        "computed_twice": round(ended.recomputed_tokens / max(ended.input_tokens, 1), 4),
        "hit_ratio": found["cache"]["hit_ratio"],
        "tbt_p90_s": found["tbt_top10_mean_s"]["p90"],
        "simulated_s": found["simulated_s"],
    }
