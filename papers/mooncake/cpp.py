"""v3's section 5.1: why nodes are joined to one prefill instance as a pipeline of chunks (CPP).

The paper prints no measurement of it, nor the number X of nodes in a group. Only its claims about
TP, sequence parallelism and CPP can be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moonpool.config.parse import parse_config
from moonpool.config.tables import Parallelism
from moonpool.cost.model import Chunk, StepCost, prompt_chunks, prompt_s
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.calibrated import DEVICE, NUM_DEVICES, SHAPE
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from papers.constants import (
    MOONCAKE_DECODE,
    MOONCAKE_PREFILL,
    PAPERS_DEFAULTS,
    VLLM_PROMPT_TOKENS,
    device_of,
    roofline,
    shape_of,
)
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import ClusterRun, Overrides, cluster
from papers.mooncake.workload import MooncakeWorkload, read_workload
from papers.options import Options
from papers.plot import Panel, PlotSeries, bars

KINDS: tuple[Parallelism, ...] = ("tp", "tp+sp", "pp", "cpp")
NODES = (2, 4)
LENGTHS = (512, 2_048, 8_192, 16_384, 32_768, 65_536, 131_072)
PRINTED = (2_048, 8_192, 32_768, 131_072)
SHORT, LONG = 2_048, 131_072
NAMES = {n: f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS}
CHUNK_TOKENS: int = DEFAULTS["engine"]["chunk_tokens"]
SHORT_OVERHEAD = 0.1  # this share of a node's time counts as no idle time
NEAR_X = 0.85  # this share of X counts as an X-fold gain

CLUSTER_REQUESTS = 2_000
CLUSTER_NODES = 2  # of a prefill instance; as many nodes in all as without groups
ALONE = "one node each"


class IdleGroupRun(NamedTuple):
    """One prompt on an otherwise idle group."""

    latency_s: float
    nodes_s: float  # busy time of all nodes together
    nic_bytes: float  # sent by all nodes together


Table = dict[tuple[int, int, Parallelism], IdleGroupRun]
"""Runs by prompt length, nodes and kind. With one node all kinds are equal, and prompts are not
divided."""


@dataclass(frozen=True, slots=True)
class ClusterNicRun:
    """A run of the whole cluster, and the used shares of its prefill nodes' NICs: by traffic within
    the groups (computed from the tokens), and by KVCache (over the links)."""

    served: ClusterRun
    group_share: float
    kvcache_share: float


def run(options: Options) -> Finding:
    table = {
        (length, nodes, kind): alone(length, nodes, kind)
        for length in LENGTHS
        for nodes in (1, *NODES)
        for kind in KINDS
    }
    workload = read_workload(options, "conversation")
    if len(workload.rows) > CLUSTER_REQUESTS:
        origin = f"{workload.name} trace: the first {CLUSTER_REQUESTS:,} requests"
        workload = replace(workload, rows=workload.rows[:CLUSTER_REQUESTS], origin=origin)
    found: dict[str, ClusterNicRun] = {}
    for name in (ALONE, *KINDS):
        options.progress(name)
        found[name] = serve_groups(workload, name, options.seed)
    return Finding(
        name="mooncake-cpp",
        title="Prefill instances of several nodes",
        source="Mooncake arXiv v3, section 5.1",
        paper_inputs=(
            "the claims alone: the paper prints neither a time nor X, its number of nodes",
        ),
        chosen_inputs=(workload.origin, *CHOSEN_INPUTS),
        rows=(*_counts(), *_alone_rows(table), *_cluster_rows(found)),
        # The cluster serves only a part of the trace.
        checks=(
            *_alone_checks(table),
            *(replace(check, partial=True) for check in _cluster_checks(found)),
        ),
        notes=NOTES,
        panels=_panels(table, found),
    )


CHOSEN_INPUTS = (
    (
        f"{NUM_DEVICES} x {DEVICE} a node, {SHAPE}, by the roofline: the calibrated cost is known "
        "only as a whole, so it would divide without loss"
    ),
    (
        f"X of {NODES[0]} and {NODES[1]} for a prompt alone, of {CLUSTER_NODES} for the cluster, "
        f"which keeps its {MOONCAKE_PREFILL} prefill and {MOONCAKE_DECODE} decode nodes"
    ),
    f"CPP in chunks of {CHUNK_TOKENS:,} tokens, the others in whole prompts; nothing turned away",
    (
        "a ring that divides causal attention evenly and sends while it computes, so that a layer "
        "takes the longer of the two: the best that a ring can do"
    ),
)
NOTES = (
    (
        "Against TP+SP the paper's case rests on bytes and on short prompts, not on the time of a "
        "long prompt alone: with a perfect ring TP+SP is ahead of CPP at every length, since no "
        "stage waits to be filled and no prompt is cut (cutting costs 5 % of the time at 128k)."
    ),
    (
        "Joining nodes makes long prompts faster and costs throughput: a group of "
        "two does what two nodes apart do only where their time for a prompt does not grow. With "
        "TP it all but doubles."
    ),
    (
        "What a group sends within itself lengthens its steps but takes no bandwidth from KVCache "
        "on its way: the paper's point that CPP contends less shows in the shares of the NICs, not "
        "in the other times."
    ),
    (
        "Prompts below one chunk pay the engine's 3 ms once a stage: at 512 tokens 12 % on four "
        "nodes, where TP+SP takes 2.2 times and TP 5.7 times one node's time."
    ),
)


def alone(length: int, num_nodes: int, kind: Parallelism) -> IdleGroupRun:
    """Nothing of the prompt is cached."""
    base = roofline(DEVICE, SHAPE, NUM_DEVICES)
    shape = shape_of(SHAPE)
    cost = group_cost(base, shape, num_nodes, kind, Nic.of(device_of(DEVICE), NUM_DEVICES))
    chunk_tokens = length if num_nodes == 1 else CHUNK_TOKENS
    return IdleGroupRun(
        group_prefill_s(cost, kind, length, 0, chunk_tokens),
        group_node_s(cost, num_nodes, kind, length, 0, chunk_tokens),
        group_nic_bytes(shape, num_nodes, kind, length),
    )


def serve_groups(workload: MooncakeWorkload, name: str, seed: int) -> ClusterNicRun:
    """`name` is a kind, or ALONE for the same number of nodes, each as a separate instance."""
    nodes = 1 if name == ALONE else CLUSTER_NODES
    kind: Parallelism = next((kind for kind in KINDS if kind == name), "tp")
    whole = kind != "cpp"
    overrides = cluster(MOONCAKE_PREFILL // nodes, MOONCAKE_DECODE)
    overrides["hardware"] = {"cost": "roofline", "nodes_per_prefill": nodes, "parallelism": kind}
    # For whole prompts, the budget only decides which short prompts may share a step.
    overrides["engine"] = {"batching": "whole-prompts" if whole else "chunked"}
    config = parse_config("", overrides, PAPERS_DEFAULTS)
    hardware = build_hardware(parse_config("", _believed(overrides, whole), DEFAULTS))
    simulation = Simulation(config, hardware, SimulationSettings(seed=seed))
    simulation.run(
        make_arrivals(
            workload.rows,
            workload.block_tokens,
            config.pool.block_tokens,
            hardware.largest_request_tokens,
        )
    )
    served = ClusterRun(simulation, summarise(simulation, 0.0))
    found = simulation.collector
    sent = 0.0
    if nodes > 1:  # linear in both numbers, so their sums will do
        sent = group_nic_bytes(shape_of(SHAPE), nodes, kind, found.input_tokens, found.hit_tokens)
    rate = Nic.of(device_of(DEVICE), NUM_DEVICES).bytes_per_s
    capacity = rate * MOONCAKE_PREFILL * simulation.last_end_s
    links = simulation.network.links.values()
    carried = [x for x in links if x.name.startswith("prefill") and x.name.endswith(" out")]
    could = sum(link.bytes_per_s for link in carried) * simulation.last_end_s
    moved = sum(link.bytes_carried for link in carried)
    return ClusterNicRun(served, sent / capacity, moved / could)


def _believed(overrides: Overrides, whole: bool) -> Overrides:
    """Returns the Conductor's estimate, fitted to prompts in the chunks that are used later."""
    engine = overrides["engine"]
    if whole:
        engine = {**engine, "chunk_tokens": VLLM_PROMPT_TOKENS}
    return {**overrides, "engine": engine}


def _counts() -> Iterator[FindingRow]:
    """Yields the figure that the paper counts: exchanges between nodes per layer."""
    shape, nodes = shape_of(SHAPE), NODES[0]
    per_layer = shape.layers * 2 * (nodes - 1) * shape.activation_bytes_per_token
    ours = group_nic_bytes(shape, nodes, "tp", 1) / per_layer
    yield FindingRow("tp: all-reduces over the NICs, per layer", "", 2.0, ours)


def _alone_rows(table: Table) -> Iterator[FindingRow]:
    for length in PRINTED:
        one = table[length, 1, "tp"]
        yield FindingRow(f"{NAMES[length]}, one node: prefill", "s", None, one.latency_s)
        for nodes in NODES:
            for kind in KINDS:
                found = table[length, nodes, kind]
                note = (
                    f"{one.latency_s / found.latency_s:.2f} x as fast; nodes' time "
                    f"x {found.nodes_s / one.nodes_s:.2f}; {found.nic_bytes / 1e9:,.2f} GB"
                )
                label = f"{NAMES[length]}, {kind} of {nodes}: prefill"
                yield FindingRow(label, "s", None, found.latency_s, note)


def _cluster_rows(found: dict[str, ClusterNicRun]) -> Iterator[FindingRow]:
    for name, run_of in found.items():
        served = run_of.served
        note = f"prefill busy {served.utilisation('prefill'):.2f}"
        yield FindingRow(f"cluster, {name}: mean TTFT", "s", None, served.ttft_s, note)
        p99_s = served.simulation.collector.ttft_s.quantile(0.99)
        yield FindingRow(f"cluster, {name}: p99 TTFT", "s", None, p99_s)
        note = f"KVCache {100 * run_of.kvcache_share:.2f} %"
        label = f"cluster, {name}: NICs busy within groups"
        yield FindingRow(label, "%", None, 100 * run_of.group_share, note)


def _alone_checks(table: Table) -> tuple[Check, ...]:
    def every(kind: Parallelism, lengths: tuple[int, ...], part: str, than: Parallelism) -> bool:
        """Whether `kind` has a lower value than the other kind, at all these lengths and X."""
        return all(
            getattr(table[length, nodes, kind], part) < getattr(table[length, nodes, than], part)
            for length in lengths
            for nodes in NODES
        )

    short, long = table[SHORT, 1, "cpp"], table[LONG, 1, "cpp"]
    speedups = {n: long.latency_s / table[LONG, n, "cpp"].latency_s for n in NODES}
    overheads = [table[SHORT, n, "cpp"].nodes_s / short.nodes_s - 1 for n in NODES]
    upto_chunk = tuple(n for n in LENGTHS if n <= CHUNK_TOKENS)
    longer = tuple(n for n in LENGTHS if n > CHUNK_TOKENS)
    return (
        Check(
            "CPP sends fewer bytes than TP and TP+SP at every length and X (as few as PP)",
            every("cpp", LENGTHS, "nic_bytes", "tp")
            and every("cpp", LENGTHS, "nic_bytes", "tp+sp"),
        ),
        Check(
            f"CPP has no cost for short inputs: one chunk takes its nodes at most "
            f"{SHORT_OVERHEAD:.0%} longer than one node (here {max(overheads):.1%})",
            max(overheads) <= SHORT_OVERHEAD,
        ),
        Check(
            "CPP makes a long prompt nearly X times as fast ("
            + ", ".join(f"{speedups[n]:.2f} x on {n}" for n in NODES)
            + ")",
            all(speedups[n] >= NEAR_X * n for n in NODES),
        ),
        Check(
            "TP across nodes wastes them: more of their time than CPP at every length and X",
            every("cpp", LENGTHS, "nodes_s", "tp"),
        ),
        Check(
            "TP+SP does worse on short inputs: more of the nodes' time than CPP up to one chunk",
            every("cpp", upto_chunk, "nodes_s", "tp+sp"),
        ),
        Check(
            "a long prompt alone is faster with CPP than with TP+SP and a perfect ring",
            every("cpp", longer, "latency_s", "tp+sp"),
        ),
    )


def _cluster_checks(found: dict[str, ClusterNicRun]) -> tuple[Check, ...]:
    ttft_s = {name: each.served.ttft_s for name, each in found.items()}
    shares = {kind: found[kind].group_share for kind in KINDS}
    return (
        Check("in the cluster, CPP's mean TTFT is below PP's", ttft_s["cpp"] < ttft_s["pp"]),
        Check("in the cluster, CPP's mean TTFT is below TP's", ttft_s["cpp"] < ttft_s["tp"]),
        Check("in the cluster, CPP's mean TTFT is below TP+SP's", ttft_s["cpp"] < ttft_s["tp+sp"]),
        Check(
            "in the cluster, CPP and PP leave the NICs to KVCache more than the others do",
            max(shares["cpp"], shares["pp"]) < min(shares["tp"], shares["tp+sp"]),
        ),
    )


def _panels(table: Table, found: dict[str, ClusterNicRun]) -> tuple[Panel, ...]:
    most = max(NODES)
    mean = {name: each.served.ttft_s for name, each in found.items()}
    p99 = {
        name: each.served.simulation.collector.ttft_s.quantile(0.99) for name, each in found.items()
    }
    return (
        _panel(table, most, "latency_s", "A prompt alone", "prefill (s)"),
        _panel(table, most, "nodes_s", "What it takes of the nodes", "nodes' busy time (s)"),
        _panel(table, most, "nic_bytes", "What the nodes send each other", "bytes"),
        Panel(
            f"The cluster, groups of {CLUSTER_NODES}",
            "prefill instances",
            "TTFT (s)",
            (bars("mean", "ours", mean), bars("p99", "ours", p99)),
            log_y=True,
        ),
    )


def _panel(table: Table, num_nodes: int, part: str, title: str, y_label: str) -> Panel:
    at = tuple(float(length) for length in LENGTHS)

    def series(label: str, nodes: int, kind: Parallelism) -> PlotSeries:
        values = tuple(float(getattr(table[length, nodes, kind], part)) for length in LENGTHS)
        return PlotSeries(label, "ours", "line", at, values)

    lines = [series(f"{kind} of {num_nodes}", num_nodes, kind) for kind in KINDS]
    if part != "nic_bytes":  # last, so that a kind has one colour in all panels
        lines.append(series("one node", 1, "tp"))
    return Panel(title, "prompt (tokens)", y_label, tuple(lines), log_x=True, log_y=True)


def group_prefill_s(
    cost: StepCost, kind: Parallelism, num_tokens: int, cached_tokens: int, chunk_tokens: int
) -> float:
    """Latency of one prompt alone on the group, in seconds. Only cpp divides it into chunks."""
    whole = num_tokens if kind != "cpp" else chunk_tokens
    return pipeline_s(cost, prompt_chunks(num_tokens, cached_tokens, whole))


def pipeline_s(cost: StepCost, chunks: Sequence[Chunk]) -> float:
    """Returns the time at which the last of these chunks leaves the last stage of an otherwise idle
    pipeline.

    A chunk enters a stage when it has arrived from the previous stage and the previous chunk has
    left.
    """
    free_at = [0.0] * cost.num_stages
    for chunk in chunks:
        step_s, hop_s = cost.step_s((chunk,), 0, 0), cost.hop_s(chunk.num_tokens)
        at = 0.0
        for stage, free in enumerate(free_at):
            free_at[stage] = max(at, free) + step_s
            at = free_at[stage] + hop_s
    return free_at[-1]


def group_node_s(
    cost: StepCost,
    num_nodes: int,
    kind: Parallelism,
    num_tokens: int,
    cached_tokens: int,
    chunk_tokens: int,
) -> float:
    """Busy time of all nodes of the group for one prompt, summed.

    Under load, this and not the latency determines the throughput of the group.
    """
    whole = num_tokens if kind != "cpp" else chunk_tokens
    return num_nodes * prompt_s(cost, num_tokens, cached_tokens, whole)


def group_nic_bytes(
    shape: ModelShape,
    num_nodes: int,
    kind: Parallelism,
    num_tokens: int,
    cached_tokens: int = 0,
) -> float:
    """Bytes that the nodes of a group send to each other for one prompt.

    Cached KVCache is where it is needed, except with a ring (tp+sp), which passes all of it around.
    """
    others = num_nodes - 1
    new = max(num_tokens - cached_tokens, 1)
    if kind == "tp":
        return 2 * shape.layers * 2 * others * new * shape.activation_bytes_per_token
    if kind == "tp+sp":
        return others * num_tokens * shape.kv_bytes_per_token
    return others * new * shape.activation_bytes_per_token
