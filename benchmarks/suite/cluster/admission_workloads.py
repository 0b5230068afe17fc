"""Effective requests of every admission policy on workloads that chance draws.

A draw is a kind of requests, an arrangement of instances, both SLOs, a pattern of arrivals and a
load. The load is the least work by the oracle (`least_work`) on the scarcest resource, divided by
the available time of that resource. At load 1, a schedule without waste just serves all requests
that an idle cluster could serve. A seed and a number give the same draw on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from moonpool.config.tables import ADMISSIONS, Config
from moonpool.gc_tuning import rare_collections
from moonpool.sim.hardware.build import Hardware, build_hardware
from moonpool.sim.workload import Arrival, make_arrivals
from moonpool.studies.cluster import cluster_config
from moonpool.studies.hardware_files import read_catalogue_and_profile
from moonpool.trace.builtin import BUILT_IN, BUILT_IN_MIXES
from moonpool.trace.generate import BLOCK_TOKENS, generate, generate_mix
from moonpool.trace.jsonl import write_trace
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceRow
from moonpool_lab.oracle.bound import Resource
from moonpool_lab.oracle.cluster import limits_of
from moonpool_lab.oracle.least_work import LeastWork
from moonpool_lab.oracle.search import WITHOUT_WAIT, Runner

KINDS = (
    *("conversation", "toolagent", "synthetic", "agents", "jobs", "hot-set", "l-eval"),
    *("arxiv-sum", "simulated-16k", "scan"),
)
CLUSTERS = (
    *((1, 1, 0), (2, 2, 0), (4, 4, 0), (6, 2, 0), (2, 6, 0), (8, 8, 0), (12, 4, 0)),
    *((0, 0, 2), (0, 0, 4), (0, 0, 8), (1, 1, 2)),
)
"""Prefill, decode and mixed instances."""
SLO_TTFT_S = (3.0, 10.0, 30.0)
SLO_TBT_S = (0.035, 0.05, 0.1)
PATTERNS = ("as is", "on-off", "ramp", "spike")
LOADS = (0.3, 4.0)
"""Least and greatest load; its logarithm is uniform."""
TRACE_EVERY = 3
"""One draw in this many comes from a recorded trace, if any is given."""
LEAST_POSSIBLE = 0.5
"""SLOs that an idle cluster meets for a smaller share of the requests are drawn again."""
MOST_TRIES = 20
LOST = 0.01
"""A row is lost if another policy serves more than this share more."""


class AdmissionDraw(NamedTuple):
    """One workload by its number; `traces` are recorded traces that it may use."""

    seed: int
    number: int
    requests: int
    traces: tuple[str, ...] = ()
    folder: str | None = None  # folder in which the workload's trace is kept


@dataclass(frozen=True, slots=True)
class AdmissionWorkload:
    """Requests whose arrivals follow a pattern, and the cluster that they arrive at."""

    rows: list[TraceRow]
    block_tokens: int
    config: Config
    hardware: Hardware
    words: dict[str, Any]  # the drawn parameters, by name


def compare_on_draws(draws: Iterable[AdmissionDraw], processes: int) -> Iterator[dict[str, Any]]:
    """Yields one row per draw, in order. Raises TraceError and ConfigError."""
    if processes == 1:
        yield from map(compare_policies, draws)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(compare_policies, draws)


def compare_policies(draw: AdmissionDraw) -> dict[str, Any]:
    """Simulates every built-in policy on one workload, with the wait for a decode batch and without
    it."""
    workload = draw_workload(draw)
    if draw.folder is not None:
        write_trace(workload.rows, Path(draw.folder) / f"{draw.seed}-{draw.number}.jsonl")
    runner = Runner(workload.config, workload.hardware, _arrivals(workload))
    with rare_collections():
        effective = {name: len(runner.policy(name)) for name in ADMISSIONS}
        for name in ADMISSIONS:
            effective[f"{name}{WITHOUT_WAIT}"] = len(runner.policy(name, decode_wait=False))
    return {"number": draw.number, **workload.words, "effective": effective}


def draw_workload(draw: AdmissionDraw) -> AdmissionWorkload:
    """Draws the workload for the seed and the number."""
    rng = Random(f"{draw.seed}/{draw.number}")
    name, rows, block_tokens = _draw_rows(rng, draw)
    prefill, decode, mixed = rng.choice(CLUSTERS)
    pattern, load = rng.choice(PATTERNS), LOADS[0] * (LOADS[1] / LOADS[0]) ** rng.random()
    for _ in range(MOST_TRIES):
        ttft_s, tbt_s = rng.choice(SLO_TTFT_S), rng.choice(SLO_TBT_S)
        overrides: dict[str, dict[str, Any]] = {
            "cluster": {"prefill": prefill, "decode": decode, "mixed": mixed},
            "slo": {"ttft_s": ttft_s, "tbt_s": tbt_s},
        }
        config = cluster_config(None, overrides)
        catalogue, profile = read_catalogue_and_profile(config, None)
        hardware = build_hardware(config, profile, catalogue, 1.0, 1.0)
        workload = AdmissionWorkload(rows, block_tokens, config, hardware, {})
        demand, resources = limits_of(config, hardware, _arrivals(workload))
        if demand.possible.mean() >= LEAST_POSSIBLE:
            break
    duration_s = scarcest_work_s(demand, resources) / load
    words = {
        "workload": name,
        "cluster": _cluster_words(prefill, decode, mixed),
        "flags": f"--prefill {prefill} --decode {decode} --mixed {mixed}"
        f" --slo-ttft {ttft_s:g} --slo-tbt {tbt_s:g}",
        "slo_ttft_s": ttft_s,
        "slo_tbt_s": tbt_s,
        "arrivals": pattern,
        "load": round(load, 2),
        "requests": len(rows),
        "possible": int(demand.possible.sum()),
        "duration_s": round(duration_s, 1),
    }
    arriving = arrive_by(rows, _rates(pattern, rng), duration_s)
    return AdmissionWorkload(arriving, block_tokens, config, hardware, words)


def scarcest_work_s(demand: LeastWork, resources: Sequence[Resource]) -> float:
    """Returns the least time in which the cluster could do the work of all requests that an idle
    cluster serves, if all of them could begin at once."""
    possible = demand.possible
    return max(
        (
            sum(float(work.seconds[possible].sum()) for work in resource.requests)
            + sum(float(work.seconds.sum()) for work in resource.nodes)
        )
        / resource.instances
        for resource in resources
        if resource.instances
    )


def arrive_by(
    rows: Sequence[TraceRow], rates: Sequence[float], duration_s: float
) -> list[TraceRow]:
    """Returns the same requests in the same order within `duration_s`. `rates`: relative arrival
    rates in equal parts of that time. Times are whole milliseconds, as in a file."""
    first_s, last_s = rows[0].arrived_s, rows[-1].arrived_s
    places = (np.array([row.arrived_s for row in rows]) - first_s) / max(last_s - first_s, 1e-9)
    arrived = np.concatenate(([0.0], np.cumsum(rates) / sum(rates)))
    warped = np.interp(places, arrived, np.linspace(0.0, duration_s, len(rates) + 1))
    return [
        msgspec.structs.replace(row, arrived_s=round(at_s * 1000) / 1000)
        for row, at_s in zip(rows, warped.tolist(), strict=True)
    ]


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how much `goodput` loses to the best of the other policies, over all rows. All
    policies use the wait for a decode batch. The sums are with that wait and without it."""
    losses = [loss(row["effective"]) for row in rows]
    return {
        "rows": len(rows),
        "lost_rows": sum(lost > LOST for lost in losses),
        "worst_loss": round(max(losses, default=0.0), 4),
        "sum": {name: sum(row["effective"][name] for row in rows) for name in rows[0]["effective"]},
        "sum_of_best_others": sum(_best_other(row["effective"]) for row in rows),
    }


def loss(effective: dict[str, int]) -> float:
    """The share of the best other policy's effective requests that `goodput` lacks; negative if it
    serves more."""
    best = _best_other(effective)
    return (best - effective["goodput"]) / max(best, 1)


def _best_other(effective: dict[str, int]) -> int:
    return max(effective[name] for name in ADMISSIONS if name != "goodput")


def _draw_rows(rng: Random, draw: AdmissionDraw) -> tuple[str, list[TraceRow], int]:
    """The name of a workload, its requests, and the tokens of a block of its prompts."""
    if draw.traces and draw.number % TRACE_EVERY == 0:
        path = rng.choice(draw.traces)
        trace = open_trace(path)
        rows = list(trace)
        start = rng.randrange(max(len(rows) - draw.requests, 0) + 1)
        name = f"{Path(path).stem} from {start:,}"
        return name, rows[start : start + draw.requests], trace.info.block_tokens
    kind, seed = rng.choice(KINDS), rng.randrange(1 << 31)
    if kind in BUILT_IN_MIXES:
        found = generate_mix(BUILT_IN_MIXES[kind], num_requests=draw.requests, seed=seed)
    else:
        found = generate(BUILT_IN[kind], num_requests=draw.requests, seed=seed)
    return kind, list(found), BLOCK_TOKENS


def _rates(pattern: str, rng: Random) -> list[float]:
    if pattern == "on-off":
        return [1.8, 0.2] * rng.randint(2, 6)
    if pattern == "ramp":
        return [0.2 + 0.08 * part for part in range(21)]
    if pattern == "spike":
        rates = [0.6] * 10
        rates[rng.randrange(2, 9)] = 4.6
        return rates
    return [1.0]


def _arrivals(workload: AdmissionWorkload) -> list[Arrival]:
    config, hardware = workload.config, workload.hardware
    sizes = workload.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens
    return list(make_arrivals(workload.rows, *sizes))


def _cluster_words(prefill: int, decode: int, mixed: int) -> str:
    parts = [f"{prefill}P+{decode}D"] * bool(prefill) + [f"{mixed} mixed"] * bool(mixed)
    return " and ".join(parts)
