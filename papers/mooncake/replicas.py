"""FAST'25 Fig. 11: how many prefill nodes hold the most used blocks over time.

No component plans these replicas: fetches from a busy holder leave them behind."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from moonpool.sim.clock import Priority
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.simulation import Simulation
from moonpool.trace.blocks import prompt_keys
from moonpool.types import BlockKey, InstanceId, Role
from papers.constants import MOONCAKE_DECODE, MOONCAKE_PREFILL
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import cluster, serve
from papers.mooncake.workload import (
    MooncakeWorkload,
    find_workload,
    read_workload,
)
from papers.options import Options
from papers.plot import Panel, PlotSeries

EVERY_S = 30.0
BANDS = {"top 10": (0, 10), "top 100": (0, 100), "around the 1000th": (950, 1050)}
PAPER = {  # most replicas seen, of the lines of the figure
    "conversation": {"top 10": 8.0, "top 100": 7.0, "around the 1000th": 6.0},
    "toolagent": {"top 10": 8.0},
    "synthetic": {"top 10": 5.0},
}


class ReplicaSample(NamedTuple):
    """Mean number of replicas by band, at one time."""

    at_s: float
    replicas: dict[str, float]


def run(options: Options) -> Finding:
    workloads = [
        read_workload(options, "conversation"),
        *(find_workload(options, name) for name in ("toolagent", "synthetic")),
    ]
    found = {workload.name: _sampled(options, workload) for workload in workloads}
    return Finding(
        name="mooncake-replicas",
        title="Replicas of the most used blocks",
        source="Mooncake, FAST'25 Fig. 11",
        paper_inputs=("the most used keys of each trace, sampled every 30 s, 8 prefill nodes",),
        chosen_inputs=(
            *(workload.origin for workload in workloads),
            "8 decode nodes, placement kvcache-centric, each trace's own speed",
            "bands are means over their keys; the third is of the ranks 951 to 1050",
        ),
        rows=_rows(found, workloads),
        checks=_checks(found),
        notes=NOTES,
        panels=tuple(_panel(workload, found[workload.name]) for workload in workloads),
    )


NOTES = (
    (
        "The conversation trace has one hot block (the system prompt, in every request) and no "
        "other above 43 uses in an hour: the rest of its first hundred are blocks of single long "
        "sessions. For those to be on all 8 nodes within 1000 s, as in the paper, hardly two turns "
        "of a session can have gone to the same node: its Conductor fetched rather than wait even "
        "briefly. Ours copies a block only when its holder is busy for longer than the copy takes."
    ),
    "How many copies there come to be depends on the load: an idle holder is never copied from.",
    (
        "In the synthetic-like workload documents are used about equally often, the first as the "
        "1000th: its bands are alike, and their order is chance."
    ),
)


def ranked_keys(workload: MooncakeWorkload, block_tokens: int, count: int) -> list[BlockKey]:
    """The most used blocks, most used first, earlier ones first among equals. The first of the
    pool's blocks in a block of the trace represents all of them."""
    uses: Counter[int] = Counter()
    size = workload.block_tokens
    for row in workload.rows:
        uses.update(row.hash_ids[: row.input_tokens // size])
    ranked = sorted(uses, key=lambda name: (-uses[name], name))[:count]
    return [prompt_keys((name,), size, size, block_tokens)[0] for name in ranked]


def _sampled(options: Options, workload: MooncakeWorkload) -> list[ReplicaSample]:
    options.progress(workload.title)
    most = max(last for _, last in BANDS.values())
    keys = ranked_keys(workload, DEFAULTS["pool"]["block_tokens"], most)
    samples: list[ReplicaSample] = []
    ends_s = workload.rows[-1].arrived_s

    def sample(simulation: Simulation) -> None:
        index = simulation.conductor.index
        nodes = [InstanceId(f"{Role.PREFILL.value}-{i}") for i in range(MOONCAKE_PREFILL)]
        replicas = [sum(index.holds(node, key) for node in nodes) for key in keys]
        means = {
            band: sum(replicas[first:last]) / max(len(replicas[first:last]), 1)
            for band, (first, last) in BANDS.items()
        }
        now = simulation.clock.now
        samples.append(ReplicaSample(now, means))
        if now + EVERY_S <= ends_s:
            simulation.clock.after(EVERY_S, Priority.TICK, sample, simulation)

    def watch(simulation: Simulation) -> None:
        simulation.clock.after(EVERY_S, Priority.TICK, sample, simulation)

    overrides = cluster(MOONCAKE_PREFILL, MOONCAKE_DECODE)
    serve(workload, overrides, options.seed, watch=watch)
    return samples


def _most(samples: list[ReplicaSample], band: str) -> float:
    return max(sample.replicas[band] for sample in samples)


def _rows(
    found: dict[str, list[ReplicaSample]], workloads: list[MooncakeWorkload]
) -> tuple[FindingRow, ...]:
    return tuple(
        FindingRow(
            f"{workload.title}, {band}: most replicas",
            "nodes",
            PAPER[workload.name].get(band),
            _most(found[workload.name], band),
            f"at the end {found[workload.name][-1].replicas[band]:.2f}",
        )
        for workload in workloads
        for band in BANDS
    )


def _checks(found: dict[str, list[ReplicaSample]]) -> tuple[Check, ...]:
    bands = list(BANDS)
    return (
        Check(
            "the more a block is used, the more copies it has",
            all(
                _most(samples, bands[0]) >= _most(samples, bands[1]) >= _most(samples, bands[2])
                for samples in found.values()
            ),
        ),
        Check(
            "hot blocks come to have several copies without anyone planning them",
            all(_most(samples, bands[0]) > 1 for samples in found.values()),
        ),
    )


def _panel(workload: MooncakeWorkload, samples: list[ReplicaSample]) -> Panel:
    at = tuple(sample.at_s for sample in samples)
    ends = (at[0], at[-1])
    papers = [
        PlotSeries(f"{band}: most", "paper", "line", ends, (most,) * 2)
        for band, most in PAPER[workload.name].items()
    ]
    ours = [
        PlotSeries(band, "ours", "line", at, tuple(sample.replicas[band] for sample in samples))
        for band in BANDS
    ]
    return Panel(workload.title, "time (s)", "replicas (nodes)", (*papers, *ours))
