"""Makes the report's sections "How the cluster coped" and "KVCache and network"."""

from __future__ import annotations

from typing import Any

from moonpool.pages.chart import HeatRow, bars, count_axis, heat_map, time_axis
from moonpool.pages.units import (
    byte_size,
    counted,
    duration,
    percent,
    short_count,
    significant,
    whole,
)
from moonpool.sim.network import Link
from moonpool.sim.report.plots import (
    NO_REQUEST,
    TOO_SHORT,
    Limit,
    ReportFigure,
    Series,
    Table,
    busy_shares,
    distribution,
    over_time,
    thinned,
    window_edges,
)
from moonpool.sim.sim_instance import SimInstance
from moonpool.sim.simulation import Simulation
from moonpool.types import InstanceId, Role

MAX_CELLS = 160
"""The most time windows of the heat map."""
NUM_BUSIEST_LINKS = 8
LINK_KINDS = {
    "in": "into instances",
    "out": "out of instances",
    "pcie": "PCIe, DRAM to accelerators",
    "ssd-read": "SSD, to DRAM",
    "ssd-write": "SSD, from DRAM",
}
"""The kinds of links by the last part of a link's name."""


def cluster_figures(simulation: Simulation, figures: dict[str, Any]) -> list[ReportFigure]:
    """`figures` are those of `summarise`."""
    return [
        _load(simulation),
        _instances(simulation),
        _roles(simulation, figures),
        _queue(simulation),
        _running(simulation),
        _prefill_compute(simulation, figures),
        _prediction_error(simulation, figures),
    ]


def kvcache_figures(simulation: Simulation, figures: dict[str, Any]) -> list[ReportFigure]:
    """`figures` are those of `summarise`."""
    return [
        _cache(figures),
        _links(simulation, figures),
        _held(simulation, figures),
        _busiest(simulation),
    ]


def busy_share(nodes: list[SimInstance], span_s: float) -> list[float]:
    """Returns the share of the run in which each instance computed."""
    return [min(node.engine.figures.busy_s / max(span_s, 1e-9), 1.0) for node in nodes]


def _load(simulation: Simulation) -> ReportFigure:
    timeline, config = simulation.timeline, simulation.config.conductor
    how = (
        "Predicted latency over the SLO, as the mean over a pool's instances; 1 is the slowest "
        "that the SLO allows. Prefill: the TTFT. Decode: the TBT with the answers of this moment. "
        "Projected: the TBT at the moment when a prefill that starts now will usually have ended."
    )
    parts = [
        Series("prefill pool", thinned(timeline.series("prefill_load")), "c1"),
        Series("decode pool", thinned(timeline.series("decode_load")), "c2"),
        Series("decode pool, projected", thinned(timeline.series("decode_projected")), "c3 dash"),
    ]
    # with `decode_wait` off, decode instances compare their load with the limit, too
    checks = config.admission != "none" and not config.decode_wait
    checks = checks or config.admission in ("baseline", "early", "predictive")
    refuses = "refuses above" if checks else "limit, not enforced:"
    return over_time(
        "Load over time",
        how,
        parts,
        lambda high: count_axis(high, "predicted / promised"),
        significant,
        Limit(config.load_limit, f"{refuses} {significant(config.load_limit)}"),
        wide=True,
    )


def _queue(simulation: Simulation) -> ReportFigure:
    return over_time(
        "Prompts waiting",
        f"On all {_role(simulation, Role.PREFILL)} instances, while not being computed: queued, "
        "fetching cached blocks, or in handover. A queue that keeps growing means that more "
        "requests arrive than the instances can compute.",
        [Series("prompts", thinned(simulation.timeline.series("prefill_queued")), "c1", True)],
        lambda high: count_axis(high, "prompts"),
        significant,
    )


def _running(simulation: Simulation) -> ReportFigure:
    return over_time(
        "Answers in decode",
        f"All {_role(simulation, Role.DECODE)} instances together. More answers at once "
        "make better use of each read of the weights, and lengthen the time between tokens.",
        [Series("answers", thinned(simulation.timeline.series("decode_running")), "c2", True)],
        lambda high: count_axis(high, "answers"),
        significant,
    )


def _role(simulation: Simulation, role: Role) -> str:
    """Returns `role`, or mixed if the cluster has no instance of that role."""
    return role.value if getattr(simulation.config.cluster, role.value) else Role.MIXED.value


def _instances(simulation: Simulation) -> ReportFigure:
    timeline = simulation.node_timeline
    title = "Each instance over time"
    shown, everyone = len(timeline.names), len(simulation.nodes)
    which = "One row per instance" if shown == everyone else f"The first {shown} of {everyone:,}"
    how = (
        f"{which}; darker means that it computed for a larger share of the time, pale means idle. "
        "At the right stands the share of the whole run."
    )
    if len(timeline.rows) < 2:
        return ReportFigure(title, how, note=TOO_SHORT, wide=True)
    heat_rows = []
    edges = window_edges(timeline.series(timeline.names[0]), MAX_CELLS)
    span_s = simulation.clock.now
    for name in timeline.names:
        node = simulation.nodes[InstanceId(name)]
        busy = node.engine.figures
        caption = (
            f"{name}: computed {duration(busy.busy_s)} of {duration(span_s)} in "
            f"{busy.num_steps:,} steps; {busy.prefill_tokens:,} prompt tokens, "
            f"{busy.decode_tokens:,} tokens decoded"
        )
        shares = busy_shares(timeline.series(name), edges)
        mean = percent(min(busy.busy_s / span_s, 1.0))
        heat_rows.append(HeatRow(name, node.info.role.value, shares, mean, caption))
    key = (("heat-key h1", "hardly computing"), ("heat-key h5", "half"), ("heat-key h10", "always"))
    chart = heat_map(heat_rows, edges, time_axis(edges[-1]), title)
    return ReportFigure(title, how, chart, key=key, wide=True)


def _roles(simulation: Simulation, figures: dict[str, Any]) -> ReportFigure:
    span_s = max(simulation.clock.now, 1e-9)
    head = (
        *("Instances", "Computing: mean", "least to most", "Steps", "Prompt tokens"),
        *("Tokens decoded", "Idle gaps", "mean gap", "KVCache held, mean", "held × time"),
    )
    rows = []
    for role in Role:
        nodes = [node for node in simulation.nodes.values() if node.info.role is role]
        if not nodes:
            continue
        engines = [node.engine.figures for node in nodes]
        shares = busy_share(nodes, span_s)
        num_gaps = sum(one.num_bubbles for one in engines)
        held_byte_s = figures["kvcache_occupation_byte_s"].get(role.value, 0.0)
        rows.append(
            (
                f"{len(nodes):,} {role.value}",
                percent(sum(shares) / len(shares)),
                f"{percent(min(shares))} to {percent(max(shares))}",
                whole(sum(one.num_steps for one in engines)),
                short_count(sum(one.prefill_tokens for one in engines)),
                short_count(sum(one.decode_tokens for one in engines)),
                whole(num_gaps),
                duration(sum(one.bubble_s for one in engines) / max(num_gaps, 1)),
                byte_size(held_byte_s / span_s),
                f"{byte_size(held_byte_s)}·s",
            )
        )
    bubbles = figures["bubbles"]
    how = (
        "Shares are of the whole run. An idle gap (bubble) is the time between two steps of an "
        f"instance: {bubbles['count']:,} in all, {duration(bubbles['mean_s'])} on average, "
        f"{percent(bubbles['share'])} of all instances' time. Held KVCache is the memory of "
        "unfinished requests; multiplied by its time it measures what that memory costs."
    )
    return ReportFigure("What each pool did", how, table=Table(head, rows), wide=True)


def _prefill_compute(simulation: Simulation, figures: dict[str, Any]) -> ReportFigure:
    mean_s = figures["prefill_compute_s"]["mean"]
    return distribution(
        "Prefill computed per request",
        f"Time that an instance computed on a prompt, without waiting: {duration(mean_s)} on "
        "average. Savings by the cache appear here first.",
        [("c1", "answered requests", simulation.collector.prefill_compute_s)],
    )


def _prediction_error(simulation: Simulation, figures: dict[str, Any]) -> ReportFigure:
    title = "How well the Conductor predicted TTFT"
    error_s = simulation.collector.ttft_error_s
    if not error_s.count:
        return ReportFigure(title, "Predicted against true TTFT.", note=NO_REQUEST)
    found = figures["predicted_ttft_error_s"]
    bias_s = found["bias"]
    side = "low" if bias_s < 0 else "high"
    lean = f"; the mean prediction was {duration(abs(bias_s))} too {side}" if bias_s else ""
    seen = figures["predictions"]
    others = (
        f" The predicted TBT was off by {duration(seen['tbt_s']['mean_absolute'])}, the predicted"
        f" number of answers in decode by {significant(seen['decoding']['mean_absolute'])}."
    )
    return distribution(
        title,
        "Placement and admission rest on a predicted TTFT. The curve shows its absolute error: "
        f"{duration(found['mean_absolute'])} on average{lean}.{others}",
        [("c1", "answered requests", error_s)],
    )


def _cache(figures: dict[str, Any]) -> ReportFigure:
    title = "Where prompt tokens came from"
    found = figures["cache"]
    total, hits, fetched = found["input_tokens"], found["hit_tokens"], found["fetched_tokens"]
    loaded, ssd = found["loaded_tokens"], figures["ssd"]
    if not total:
        return ReportFigure(title, "Tokens of answered prompts.", note=NO_REQUEST)
    how = (
        f"Of {total:,} prompt tokens, {hits:,} ({percent(found['hit_ratio'])}) came from the "
        "cache: computed for an earlier prompt with the same prefix, and kept in the instance's "
        "own tiers or fetched from another instance. The rest was computed."
    )
    parts = [
        ("own DRAM", max(hits - fetched - loaded, 0), "c3"),
        ("other instances", fetched, "c2"),
        ("computed", total - hits, "c1"),
    ]
    if ssd["slots"]:
        parts.insert(1, ("own SSD", loaded, "c5"))
        how += (
            f" To the SSDs, {counted(ssd['demoted_blocks'], 'block')} were written "
            f"({byte_size(ssd['written_bytes'])}) and {ssd['promoted_blocks']:,} read back "
            f"({byte_size(ssd['read_bytes'])}); {ssd['spared_blocks']:,} were on the SSD "
            f"already when they left DRAM, {ssd['refused_blocks']:,} were not admitted, and "
            f"{ssd['dropped_blocks']:,} were evicted before they could be written."
        )
    rows = [
        (name, float(number), f"{short_count(number)} ({percent(number / total)})", css)
        for name, number, css in parts
    ]
    return ReportFigure(title, how, bars(rows, title, 160))


def _held(simulation: Simulation, figures: dict[str, Any]) -> ReportFigure:
    nodes = simulation.nodes.values()
    block_tokens = simulation.hardware.layout.block_tokens
    room = sum(node.instance.pool.num_blocks for node in nodes) * block_tokens
    how = (
        "Tokens whose KVCache unfinished requests hold, on all instances. The pool has room for "
        f"{short_count(room)} tokens; the rest of it caches prompts until the room is needed. "
        f"{_preemptions(figures)}"
    )
    return over_time(
        "KVCache held over time",
        how,
        [Series("held", thinned(simulation.timeline.series("held_tokens")), "c2", True)],
        lambda high: count_axis(high, "tokens"),
        lambda value: f"{short_count(value)} tokens",
        Limit(room, "whole pool"),
    )


def _links(simulation: Simulation, figures: dict[str, Any]) -> ReportFigure:
    title = "What the links carried"
    moved = figures["transfer"]
    number = moved["streams"] + moved["fetches"]
    mean = duration(moved["seconds"] / number) if number else "-"
    how = (
        f"{counted(moved['streams'], 'stream')} of KVCache from prefill to decode, and "
        f"{moved['fetches']:,} fetches of cached blocks between instances "
        f"({byte_size(moved['fetched_bytes'])}): {byte_size(moved['bytes'])} arrived; "
        f"a transfer took {mean} on average. Used: bytes over what the link could have carried in "
        "the run."
    )
    span_s = max(simulation.clock.now, 1e-9)
    rows = []
    for kind, caption in LINK_KINDS.items():
        links = [one for one in simulation.network.links.values() if _kind(one) == kind]
        if not links:
            continue
        used = [_used(link, span_s) for link in links]
        rows.append(
            (
                f"{len(links):,} {caption}, {_bandwidth(links)}",
                byte_size(sum(link.bytes_carried for link in links)),
                percent(sum(used) / len(used)),
                percent(max(used)),
                str(max(link.peak_flows for link in links)),
            )
        )
    head = ("Links", "Carried", "Used: mean", "most", "At once, most")
    return ReportFigure(title, how, table=Table(head, rows))


def _busiest(simulation: Simulation) -> ReportFigure:
    title = "The busiest links"
    span_s = max(simulation.clock.now, 1e-9)
    links = sorted(simulation.network.links.values(), key=lambda link: -link.bytes_carried)
    links = [link for link in links if link.bytes_carried][:NUM_BUSIEST_LINKS]
    how = (
        "By bytes carried. In brackets: the share of the run with a transfer under way, often no "
        "faster than its layers were computed. Transfers delay each other only where the table "
        "gives a high used share."
    )
    if not links:
        return ReportFigure(title, how, note="Nothing was transferred.")
    rows = [
        (
            link.name,
            link.bytes_carried,
            f"{byte_size(link.bytes_carried)} ({percent(min(link.busy_s / span_s, 1.0))})",
            "c2",
        )
        for link in links
    ]
    return ReportFigure(title, how, bars(rows, title, 120))


def _preemptions(figures: dict[str, Any]) -> str:
    number = figures["preemptions"]
    if not number:
        return "No request was preempted."
    if number == 1:
        return "A request was preempted once: its blocks were freed, and its tokens computed again."
    return (
        f"Requests were preempted {number:,} times: their blocks were freed, and their tokens "
        "computed again."
    )


def _bandwidth(links: list[Link]) -> str:
    most = max(link.bytes_per_s for link in links)
    same = min(link.bytes_per_s for link in links) == most
    return f"{byte_size(most)}/s each" if same else f"up to {byte_size(most)}/s"


def _kind(link: Link) -> str:
    return link.name.rsplit(" ", 1)[-1]


def _used(link: Link, span_s: float) -> float:
    return min(link.bytes_carried / max(link.bytes_per_s * span_s, 1e-9), 1.0)
