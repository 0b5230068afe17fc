"""The first words of a report: what was simulated, what came out, and the figures to remember."""

from __future__ import annotations

from html import escape
from typing import Any

from moonpool.config import Config
from moonpool.report.cluster import busy_share
from moonpool.report.words import GAP, both, counted, duration, percent, significant
from moonpool.sim.hardware import decode_nodes, prefill_nodes
from moonpool.sim.simulation import Simulation
from moonpool.types import Role


def opening(simulation: Simulation, figures: dict[str, Any], trace_name: str) -> str:
    """HTML: the summary in words, then the tiles."""
    config = simulation.config
    cluster = config.cluster
    sent = f"{_were(cluster.prefill + cluster.decode + cluster.mixed)} sent"
    first = f"{cluster_words(config)} {sent} {_sent(simulation, figures, trace_name)}"
    if figures["requests"]:
        first += f" {_outcome(config, figures)}"
    paragraphs = [f'<p class="lead">{escape(first)}</p>']
    if figures["completed"]:
        paragraphs.append(f"<p>{escape(_details(simulation, figures))}</p>")
    return "\n".join([*paragraphs, _tiles(figures)])


def cluster_words(config: Config) -> str:
    """`8 prefill + 8 decode instances, each 8 x A800-SXM with llama3-70b,`"""
    cluster, hardware = config.cluster, config.hardware
    counts = (("prefill", cluster.prefill), ("decode", cluster.decode), ("mixed", cluster.mixed))
    pools = " + ".join(f"{number:,} {role}" for role, number in counts if number)
    node = f"{hardware.devices_per_node}{GAP}×{GAP}{hardware.device}"
    grouped = prefill_nodes(config)
    group = grouped.nodes_per_prefill
    if group > 1:
        kind = "prefill" if cluster.prefill else "mixed"
        node += f" ({kind}: {group} such nodes, {grouped.parallelism.upper()})"
    decode = decode_nodes(config)
    if cluster.decode and decode.nodes_per_prefill > 1:
        node += f" (decode: {decode.nodes_per_prefill} such nodes, {decode.parallelism.upper()})"
    if cluster.decode and (decode.device, decode.devices_per_node) != (
        hardware.device,
        hardware.devices_per_node,
    ):
        node += f" (decode: {decode.devices_per_node}{GAP}×{GAP}{decode.device})"
    if cluster.decode and hardware.attention_device:
        number = hardware.attention_devices_per_node
        node += f" (attention of decode: {number}{GAP}×{GAP}{hardware.attention_device})"
    if cluster.prefill + cluster.decode + cluster.mixed == 1:
        return f"{pools} instance, {node} with {hardware.shape},"
    return f"{pools} instances, each {node} with {hardware.shape},"


def _sent(simulation: Simulation, figures: dict[str, Any], trace_name: str) -> str:
    if not figures["requests"]:
        return f"no request at all: {trace_name} has none."
    return (
        f"the {counted(figures['requests'], 'request')} of {trace_name} within "
        f"{duration(simulation.last_arrival_s)}."
    )


def _outcome(config: Config, figures: dict[str, Any]) -> str:
    slo = config.slo
    completed, refused, failed = (figures[name] for name in ("completed", "rejected", "failed"))
    total = figures["requests"]
    answered, of_all = f"{completed:,} {_were(completed)} answered", " of all"
    if completed == total:
        answered, of_all = "All were answered", ""
    elif not completed:
        answered = "None was answered"
    lost = []
    if refused:
        lost.append(f"{refused:,} {_were(refused)} refused")
    if failed:
        lost.append(f"{failed:,} failed")
    end = f"{both(lost)}." if lost else "none was refused."
    return (
        f"{answered}, {percent(figures['effective_share'])}{of_all} within both SLOs "
        f"(TTFT{GAP}≤{GAP}{duration(slo.ttft_s)}, TBT{GAP}≤{GAP}{duration(slo.tbt_s)}); {end}"
    )


def _details(simulation: Simulation, figures: dict[str, Any]) -> str:
    ttft = figures["ttft_s"]
    busy = []
    for role in Role:
        nodes = [node for node in simulation.nodes.values() if node.info.role is role]
        if nodes:
            shares = busy_share(nodes, simulation.clock.now)
            busy.append(
                f"{role.value} instances were computing {percent(sum(shares) / len(shares))} of it"
            )
    return (
        f"Half of the answers began within {duration(ttft['p50'])}, 99{GAP}% within "
        f"{duration(ttft['p99'])}. {percent(figures['cache']['hit_ratio'])} of the prompt tokens "
        f"came from the cache. The run took {duration(figures['simulated_s'])} in all; "
        f"{both(busy)}."
    )


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _tiles(figures: dict[str, Any]) -> str:
    ttft, tbt, cache = figures["ttft_s"], figures["tbt_top10_mean_s"], figures["cache"]
    refused = figures["rejected"] / max(figures["requests"], 1)
    none = not figures["completed"]
    tiles = (
        ("requests", f"{figures['requests']:,}", f"{figures['completed']:,} answered"),
        (
            "both SLOs kept",
            percent(figures["effective_share"]),
            f"{figures['effective']:,} requests",
        ),
        ("goodput", f"{significant(figures['goodput_rps'])}{GAP}/s", "within SLOs, per second"),
        ("TTFT, median", _or_dash(ttft["p50"], none), f"p99 {_or_dash(ttft['p99'], none)}"),
        ("TBT, median", _or_dash(tbt["p50"], none), f"p99 {_or_dash(tbt['p99'], none)}"),
        ("from the cache", percent(cache["hit_ratio"]), "of prompt tokens"),
        ("refused", f"{figures['rejected']:,}", percent(refused)),
        ("failed", f"{figures['failed']:,}", "deadline or fault"),
    )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _or_dash(seconds: float, none: bool) -> str:
    return "-" if none else duration(seconds)
