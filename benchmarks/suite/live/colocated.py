"""Finds the prompt lengths and loads at which separate prefill and decode instances beat colocated
ones on the same cores, first in the simulator, then live.

Two instances, as 1 prefill + 1 decode and as 2 mixed. SLOs are the paper's, for each prompt length:
10 times the unloaded TTFT and 5 times the unloaded TBT, of whichever arrangement is slower
unloaded. The planner's choice is the arrangement with the higher simulated capacity; it does not
use the live runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.suite.live.agreement import neighbours_words, run_both, simulated_slo
from moonpool.trace.row import TraceRow
from moonpool.types import Slo
from moonpool_lab.demo.local_server import LocalServer
from moonpool_lab.profiling.live_cluster import (
    LiveCluster,
    LiveWorkload,
    estimate_capacity,
    measure_live,
    simulate_rows,
)
from moonpool_lab.profiling.live_profile import LiveProfile

SIMULATED_S = 120.0
ALIKE = 0.05
"""Goodputs as near as this are not a victory."""
Say = Callable[[str], None]


def bench_colocated(
    cluster: LiveCluster,
    workload: LiveWorkload,
    prompts: Sequence[int],
    loads: Sequence[float],
    seconds: float,
    live: bool,
    say: Say,
) -> dict[str, Any]:
    """Goodputs by prompt length, load and arrangement. `loads` are shares of the higher simulated
    capacity. Raises what servers and replays raise."""
    apart = cluster.with_(prefill=1, decode=1, mixed=0)
    together = cluster.with_(prefill=0, decode=0, mixed=2)
    with LocalServer(together.with_(admission="none").arguments()) as server:
        profile = measure_live(server.url, workload, say)
    found = []
    for tokens in prompts:
        sized = workload.with_(prompts=tokens)
        found.append(_one_length((apart, together), profile, sized, loads, seconds, live, say))
    judged = [point for row in found for point in row["points"] if "live" in point]
    told = [point for point in judged if point["simulated"]["wins"] == point["live"]["wins"]]
    if judged:
        say(f"simulation and life name the same arrangement at {len(told)} of {len(judged)} points")
    return {
        "cluster": msgspec.to_builtins(cluster),
        "answers": workload.answers,
        "profile": msgspec.to_builtins(profile),
        "lengths": found,
        "foretold": {"points": len(judged), "same": len(told)},
    }


def _one_length(
    clusters: tuple[LiveCluster, LiveCluster],
    profile: LiveProfile,
    workload: LiveWorkload,
    loads: Sequence[float],
    seconds: float,
    live: bool,
    say: Say,
) -> dict[str, Any]:
    unloaded = [simulated_slo(cluster, profile, workload) for cluster in clusters]
    slo = Slo(ttft_s=max(one.ttft_s for one in unloaded), tbt_s=max(one.tbt_s for one in unloaded))
    capacities = {
        cluster.words: estimate_capacity(cluster, profile, workload, SIMULATED_S, slo)
        for cluster in clusters
    }
    planned = winner(capacities)
    say(
        f"\nprompts of {workload.prompts}: TTFT {slo.ttft_s:.3g} s, TBT {1e3 * slo.tbt_s:.3g} ms;"
        f" capacity {_words(capacities)} requests/s: plan {planned}"
    )
    points: list[dict[str, Any]] = []
    for load in loads:
        rate_rps = load * max(capacities.values())
        rows = workload.rows(rate_rps, seconds)
        if rows:
            serving = tuple(cluster.with_(slo=slo) for cluster in clusters)
            point = {"load": load, "rate_rps": rate_rps, "requests": len(rows)}
            points.append(point | _goodputs(serving, profile, rows, workload, live, say))
            say(f"  load {load:g} ({rate_rps:.3g}/s, {len(rows)} requests): {_point(points[-1])}")
    return {
        "prompt_tokens": workload.prompts,
        "slo": msgspec.to_builtins(slo),
        "capacity_rps": capacities,
        "planned": planned,
        "points": points,
    }


def _goodputs(
    clusters: Sequence[LiveCluster],
    profile: LiveProfile,
    rows: Sequence[TraceRow],
    workload: LiveWorkload,
    live: bool,
    say: Say,
) -> dict[str, Any]:
    """Effective requests a second of each arrangement, simulated and, if wanted, live."""
    span_s = max(rows[-1].arrived_s, 1e-9)
    kinds: dict[str, dict[str, float]] = {"simulated": {}}
    for cluster in clusters:
        if live:
            both = run_both(cluster, profile, rows, workload.block_tokens)
            kinds.setdefault("live", {})[cluster.words] = both.live["effective"] / span_s
            figures = both.simulated
            for line in neighbours_words([both.live]):
                say(line)
        else:
            figures, _ = simulate_rows(cluster, profile, rows, workload.block_tokens)
        kinds["simulated"][cluster.words] = figures["effective"] / span_s
    return {
        kind: {"goodput_rps": goodputs, "wins": winner(goodputs)}
        for kind, goodputs in kinds.items()
    }


def _point(point: dict[str, Any]) -> str:
    kinds = [kind for kind in ("simulated", "live") if kind in point]
    return "; ".join(
        f"{kind} {_words(point[kind]['goodput_rps'])}: {point[kind]['wins']}" for kind in kinds
    )


def winner(goodputs: dict[str, float]) -> str:
    """Returns the best arrangement, or "alike" if the others are nearly as good."""
    best = max(goodputs, key=lambda name: goodputs[name])
    near = [name for name, one in goodputs.items() if one >= (1 - ALIKE) * goodputs[best]]
    return best if len(near) == 1 else "alike"


def _words(goodputs: dict[str, float]) -> str:
    return ", ".join(f"{name} {one:.3g}" for name, one in goodputs.items())
