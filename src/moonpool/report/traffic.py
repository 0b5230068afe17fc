"""The KVCache and its journeys: hits by where they came from, what is held, links and bytes."""

from __future__ import annotations

from typing import Any

from moonpool.report.axis import count_axis
from moonpool.report.figure import Figure, note, table
from moonpool.report.series import thinned
from moonpool.report.span import Limit, Series, over_time
from moonpool.report.svg import bars
from moonpool.report.words import byte_size, counted, duration, percent, short_count
from moonpool.sim.network import Link
from moonpool.sim.simulation import Simulation

NUM_BUSIEST = 8
KINDS = {
    "in": "into instances",
    "out": "out of instances",
    "pcie": "PCIe, DRAM to accelerators",
    "ssd-read": "SSD, to DRAM",
    "ssd-write": "SSD, from DRAM",
}


def cache_figure(figures: dict[str, Any]) -> Figure:
    title = "Where prompt tokens came from"
    found = figures["cache"]
    total, hits, fetched = found["input_tokens"], found["hit_tokens"], found["fetched_tokens"]
    loaded, ssd = found["loaded_tokens"], figures["ssd"]
    if not total:
        return Figure(title, "Tokens of answered prompts.", note("No request was answered."))
    how = (
        f"Of {total:,} prompt tokens, {hits:,} ({percent(found['hit_ratio'])}) had been computed "
        "for an earlier prompt with the same beginning and were taken from the cache, from the "
        "instance's own tiers or over the network from another's; the rest was computed."
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
            f"({byte_size(ssd['read_bytes'])}); {ssd['spared_blocks']:,} were there already when "
            f"they left DRAM, {ssd['refused_blocks']:,} were not admitted, and demand evicted "
            f"{ssd['dropped_blocks']:,} before they could be written."
        )
    rows = [
        (name, float(number), f"{short_count(number)} ({percent(number / total)})", css)
        for name, number, css in parts
    ]
    return Figure(title, how, bars(rows, title, 160))


def held_figure(simulation: Simulation, figures: dict[str, Any]) -> Figure:
    nodes = simulation.nodes.values()
    block_tokens = simulation.hardware.layout.block_tokens
    room = sum(node.instance.pool.num_blocks for node in nodes) * block_tokens
    how = (
        "Tokens whose KVCache unfinished requests hold, on all instances. The pool has room for "
        f"{short_count(room)} tokens; what is not held keeps cached prompts until the room is "
        f"needed. {_preemptions(figures)}"
    )
    return over_time(
        "KVCache held over time",
        how,
        [Series("held", thinned(simulation.timeline.series("held_tokens")), "c2", True)],
        lambda high: count_axis(high, "tokens"),
        lambda value: f"{short_count(value)} tokens",
        Limit(room, "all there is"),
    )


def links_figure(simulation: Simulation, figures: dict[str, Any]) -> Figure:
    title = "What the links carried"
    moved = figures["transfer"]
    number = moved["streams"] + moved["fetches"]
    mean = duration(moved["seconds"] / number) if number else "-"
    how = (
        f"{counted(moved['streams'], 'stream')} of KVCache from prefill to decode, and "
        f"{moved['fetches']:,} fetches of cached blocks between instances "
        f"({byte_size(moved['fetched_bytes'])}): {byte_size(moved['bytes'])} have arrived, "
        f"{mean} each in the mean. Used: bytes over what the link could have carried in the run."
    )
    span_s = max(simulation.clock.now, 1e-9)
    rows = []
    for kind, words in KINDS.items():
        links = [one for one in simulation.network.links.values() if _kind(one) == kind]
        if not links:
            continue
        used = [_used(link, span_s) for link in links]
        rows.append(
            (
                f"{len(links):,} {words}, {_bandwidth(links)}",
                byte_size(sum(link.bytes_carried for link in links)),
                percent(sum(used) / len(used)),
                percent(max(used)),
                str(max(link.peak_flows for link in links)),
            )
        )
    head = ("Links", "Carried", "Used: mean", "most", "At once, most")
    return Figure(title, how, table(head, rows))


def busiest_figure(simulation: Simulation) -> Figure:
    title = "The busiest links"
    span_s = max(simulation.clock.now, 1e-9)
    links = sorted(simulation.network.links.values(), key=lambda link: -link.bytes_carried)
    links = [link for link in links if link.bytes_carried][:NUM_BUSIEST]
    how = (
        "By bytes carried; in brackets, the share of the run in which something was on its way, "
        "often no faster than it was computed. Transfers wait for each other only where the share "
        "used, in the table, is high."
    )
    if not links:
        return Figure(title, how, note("Nothing was transferred."))
    rows = [
        (
            link.name,
            link.bytes_carried,
            f"{byte_size(link.bytes_carried)} ({percent(min(link.busy_s / span_s, 1.0))})",
            "c2",
        )
        for link in links
    ]
    return Figure(title, how, bars(rows, title, 120))


def _preemptions(figures: dict[str, Any]) -> str:
    number = figures["preemptions"]
    if not number:
        return "It never ran out."
    times = "once" if number == 1 else f"{number:,} times"
    return f"It ran out {times}: an answer lost its blocks and was computed again."


def _bandwidth(links: list[Link]) -> str:
    most = max(link.bytes_per_s for link in links)
    same = min(link.bytes_per_s for link in links) == most
    return f"{byte_size(most)}/s each" if same else f"up to {byte_size(most)}/s"


def _kind(link: Link) -> str:
    return link.name.rsplit(" ", 1)[-1]


def _used(link: Link, span_s: float) -> float:
    return min(link.bytes_carried / max(link.bytes_per_s * span_s, 1e-9), 1.0)
