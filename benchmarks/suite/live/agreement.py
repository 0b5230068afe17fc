"""Compares a live cluster with its simulation: one cluster and one workload with both drivers.

The benchmark starts the cluster, profiles it over HTTP, and finds its capacity by simulation. Then
it sends a share of that rate live, and simulates the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvloop

from benchmarks.suite.live.cpu_steal import BackgroundLoad
from benchmarks.suite.live.live_sampler import LoadSample, LoadSampler
from benchmarks.suite.live.machine_speed import drift_words, loop_s
from moonpool.sim.simulation import Simulation
from moonpool.trace.row import TraceRow
from moonpool.types import Slo
from moonpool_lab.demo.local_server import LocalServer
from moonpool_lab.profiling.attention_parts import measure_parts, parts_words
from moonpool_lab.profiling.live_cluster import (
    LiveCluster,
    LiveWorkload,
    estimate_capacity,
    measure_live,
    simulate_rows,
    unloaded_slo,
    with_parts,
)
from moonpool_lab.profiling.live_profile import LiveProfile, believed_cost
from moonpool_lab.replay.comparison import averaged, chance_words, compare
from moonpool_lab.replay.run import ReplayPlan, run_replay

UNLOADED_RPS = 0.2
UNLOADED_REQUESTS = 20
NOTICED_SHARE = 0.02
"""If other programs take at least this share of the processors' time, the report says so."""
Say = Callable[[str], None]


def bench_agreement(
    cluster: LiveCluster,
    workload: LiveWorkload,
    loads: Sequence[float],
    seconds: float,
    say: Say,
    repeats: int = 1,
) -> dict[str, Any]:
    """Comparisons by load, with the profile they rest on; of several live runs of the same
    requests, their mean is compared. Raises what server and replay raise."""
    with LocalServer(cluster.arguments()) as server:
        profile = measure_local(server, workload, say)
    if cluster.attention:
        parts = measure_parts(cluster.model)
        say(parts_words(parts))
        profile = with_parts(profile, parts)
    slo = simulated_slo(cluster, profile, workload)
    rate_rps = estimate_capacity(cluster, profile, workload, max(seconds, 60.0), slo)
    say(
        f"capacity about {rate_rps:.3g} requests/s within TTFT {slo.ttft_s:.3g} s and TBT"
        f" {1e3 * slo.tbt_s:.3g} ms (simulated)"
    )
    found = {}
    for load in loads:
        rows = workload.rows(load * rate_rps, seconds)
        both = run_both(cluster, profile, rows, workload.block_tokens)
        lives = [both.live]
        for _ in range(repeats - 1):
            lives.append(run_both(cluster, profile, rows, workload.block_tokens).live)
        comparison = compare(both.simulated, averaged(lives))
        say(f"\nload {load:g}: {len(rows)} requests in {seconds:g} s on {cluster.words}")
        life_s = sum(live["machine_loop_s"] for live in lives) / len(lives)
        drift = drift_words(profile.machine_loop_s, life_s)
        for line in (*comparison.lines(), *chance_words(lives), *neighbours_words(lives), *drift):
            say(line)
        found[f"load_{load:g}"] = {
            "passes": comparison.passes,
            "rows": msgspec.to_builtins(comparison.rows),
            "live": lives[0] if repeats == 1 else lives,
            "simulated": both.simulated,
        }
    return {
        "cluster": msgspec.to_builtins(cluster),
        "capacity_rps": rate_rps,
        "slo": msgspec.to_builtins(slo),
        "profile": msgspec.to_builtins(profile),
        "passes": all(one["passes"] for one in found.values()),
        **found,
    }


class AgreementPair(msgspec.Struct, frozen=True):
    """The results of the same requests, both ways."""

    live: dict[str, Any]
    simulated: dict[str, Any]
    simulation: Simulation
    samples: tuple[LoadSample, ...]


def run_both(
    cluster: LiveCluster, profile: LiveProfile, rows: Sequence[TraceRow], block_tokens: int
) -> AgreementPair:
    """Runs on a newly started cluster, because the simulation cannot know what an older cluster has
    cached and learned. The simulation gets the cost estimates of this Conductor."""
    with LocalServer(cluster.arguments()) as server, LoadSampler(server) as sampler:
        believed = believed_cost(server.instances()[0])
        live = replay_rows(server.url, rows, block_tokens)
    live["neighbours_share"] = sampler.neighbours_share
    live["machine_loop_s"] = sampler.machine_loop_s
    profile = msgspec.structs.replace(profile, believed=believed)
    simulated, simulation = simulate_rows(cluster, profile, rows, block_tokens)
    return AgreementPair(live, simulated, simulation, tuple(sampler.samples))


def neighbours_words(lives: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a warning if other programs computed, too."""
    yield from _share_words(max(live["neighbours_share"] for live in lives))


def _share_words(share: float) -> Iterator[str]:
    if share > NOTICED_SHARE:
        yield f"other programs took {share:.0%} of this machine meanwhile: that is no quiet machine"


def measure_local(server: LocalServer, workload: LiveWorkload, say: Say) -> LiveProfile:
    """Like `measure_live`, but warns if other processes used the CPU, because all other figures
    depend on this one."""
    neighbours = BackgroundLoad([server.pid, *server.worker_pids(), *server.attention_pids()])
    before_s = loop_s()
    profile = measure_live(server.url, workload, say)
    profile = msgspec.structs.replace(profile, machine_loop_s=(before_s + loop_s()) / 2)
    for line in _share_words(neighbours.share()):
        say(line)
    return profile


def simulated_slo(cluster: LiveCluster, profile: LiveProfile, workload: LiveWorkload) -> Slo:
    """Returns the SLOs of a twin without load."""
    rows = workload.rows(UNLOADED_RPS, UNLOADED_REQUESTS / UNLOADED_RPS)
    free = cluster.with_(admission="none")
    figures, _ = simulate_rows(free, profile, rows, workload.block_tokens)
    return unloaded_slo(figures)


def replay_rows(
    url: str,
    rows: Sequence[TraceRow],
    block_tokens: int,
    slo: Slo | None = None,
    vocab_size: int | None = None,
    model: str | None = None,
    seed: int = 0,
    *,
    api_key: str = "",
    ca_file: str = "",
) -> dict[str, Any]:
    """Returns the figures of one live run. None means the server's own SLO."""
    plan = ReplayPlan(
        url=url,
        api_key=api_key,
        ca_file=ca_file,
        rows=tuple(rows),
        block_tokens=block_tokens,
        slo_ttft_s=None if slo is None else slo.ttft_s,
        slo_tbt_s=None if slo is None else slo.tbt_s,
        vocab_size=vocab_size,
        model=model,
        seed=seed,
    )
    return uvloop.run(run_replay(plan))
