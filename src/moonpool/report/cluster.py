"""How the cluster coped: load, queues, what each instance did, and its idle time."""

from __future__ import annotations

from typing import Any

from moonpool.report.axis import count_axis, time_axis
from moonpool.report.figure import Figure, note, table
from moonpool.report.series import busy_shares, thinned, window_edges
from moonpool.report.span import Limit, Series, over_time
from moonpool.report.strips import Strip, heat_strips
from moonpool.report.words import byte_size, duration, percent, short_count, significant, whole
from moonpool.sim.node import Node
from moonpool.sim.simulation import Simulation
from moonpool.types import InstanceId, Role

MAX_CELLS = 160


def load_figure(simulation: Simulation) -> Figure:
    timeline, config = simulation.timeline, simulation.config.conductor
    how = (
        "Predicted over promised latency, the mean over a pool's instances: at 1 it is as slow as "
        "the SLO allows. Prefill: the wait for a first token. Decode: the time between tokens with "
        "the answers of this moment; projected: with those of the moment when a prefill that is "
        "placed now will usually have ended."
    )
    parts = [
        Series("prefill pool", thinned(timeline.series("prefill_load")), "c1"),
        Series("decode pool", thinned(timeline.series("decode_load")), "c2"),
        Series("decode pool, projected", thinned(timeline.series("decode_projected")), "c3 dash"),
    ]
    refuses = "refuses above" if config.admission != "none" else "limit, not enforced:"
    return over_time(
        "Load over time",
        how,
        parts,
        lambda high: count_axis(high, "predicted / promised"),
        significant,
        Limit(config.load_limit, f"{refuses} {significant(config.load_limit)}"),
        wide=True,
    )


def queue_figure(simulation: Simulation) -> Figure:
    return over_time(
        "Prompts waiting",
        f"On all {_role(simulation, Role.PREFILL)} instances, while not being computed: "
        "queued, fetching cached blocks, or handing over. A queue that keeps growing means that "
        "more arrives than can be computed.",
        [Series("prompts", thinned(simulation.timeline.series("prefill_queued")), "c1", True)],
        lambda high: count_axis(high, "prompts"),
        significant,
    )


def running_figure(simulation: Simulation) -> Figure:
    return over_time(
        "Answers being written",
        f"All {_role(simulation, Role.DECODE)} instances together; the more at once, "
        "the better the weights are used, and the longer each waits between its tokens.",
        [Series("answers", thinned(simulation.timeline.series("decode_running")), "c2", True)],
        lambda high: count_axis(high, "answers"),
        significant,
    )


def _role(simulation: Simulation, role: Role) -> str:
    """The role that does this work: mixed instances where there are none of their own."""
    return role.value if getattr(simulation.config.cluster, role.value) else Role.MIXED.value


def instances_figure(simulation: Simulation) -> Figure:
    timeline = simulation.node_timeline
    title = "Each instance over time"
    shown, everyone = len(timeline.names), len(simulation.nodes)
    which = "One row per instance" if shown == everyone else f"The first {shown} of {everyone:,}"
    how = (
        f"{which}; the darker, the larger the share of the time it was computing. Pale stretches "
        "are idle time; at the right, the share of the whole run."
    )
    if len(timeline.rows) < 2:
        words = "The run was too short to be sampled twice."
        return Figure(title, how, note(words), wide=True)
    strips = []
    edges = window_edges(timeline.series(timeline.names[0]), MAX_CELLS)
    span_s = simulation.clock.now
    for name in timeline.names:
        node = simulation.nodes[InstanceId(name)]
        busy = node.engine.figures
        words = (
            f"{name}: computed {duration(busy.busy_s)} of {duration(span_s)} in "
            f"{busy.num_steps:,} steps; {busy.prefill_tokens:,} prompt tokens, "
            f"{busy.decode_tokens:,} tokens decoded"
        )
        shares = busy_shares(timeline.series(name), edges)
        mean = percent(min(busy.busy_s / span_s, 1.0))
        strips.append(Strip(name, node.info.role.value, shares, mean, words))
    key = (("heat-key h1", "hardly computing"), ("heat-key h5", "half"), ("heat-key h10", "always"))
    return Figure(
        title, how, heat_strips(strips, edges, time_axis(edges[-1]), title), key, wide=True
    )


def busy_share(nodes: list[Node], span_s: float) -> list[float]:
    """Of each instance: the share of the run it was computing."""
    return [min(node.engine.figures.busy_s / max(span_s, 1e-9), 1.0) for node in nodes]


def roles_figure(simulation: Simulation, figures: dict[str, Any]) -> Figure:
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
        f"instance: {bubbles['count']:,} in all, {duration(bubbles['mean_s'])} in the mean, "
        f"{percent(bubbles['share'])} of all instances' time. Held KVCache is what unfinished "
        "requests occupy; times its duration it is what that memory costs."
    )
    return Figure("What each pool did", how, table(head, rows), wide=True)
