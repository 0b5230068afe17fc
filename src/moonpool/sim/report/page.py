"""Writes the report of a simulation as one page of HTML.

The page is self-contained: its content policy forbids scripts, fonts and images from elsewhere. The
template `page.html.jinja` escapes all text. The same simulation gives the same bytes, so the page
does not say when the run took place or how long it took.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.pages import look
from moonpool.pages.units import (
    GAP,
    byte_size,
    counted,
    duration,
    joined,
    percent,
    significant,
)
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import decode_nodes, prefill_nodes
from moonpool.sim.report.cluster_figures import busy_share, cluster_figures, kvcache_figures
from moonpool.sim.report.notes import notes
from moonpool.sim.report.plots import Table
from moonpool.sim.report.user_figures import user_figures
from moonpool.sim.simulation import Simulation
from moonpool.types import Role

NOT_REPRODUCIBLE = ("wall_s", "config")  # the configuration has a separate section
CONFIG_TABLES = ("cluster", "hardware", "pool", "slo", "engine", "conductor")
"""The tables that a simulation reads. Other tables may hold secrets and are not shown."""
LIVE_ONLY = (("engine", "threads"), ("engine", "device"))
"""Keys in these tables that a simulation does not read."""


def render_report(
    simulation: Simulation, figures: dict[str, Any], command: str, trace_name: str
) -> str:
    """Returns the HTML page of a simulation that has run. `figures` is the result of
    `summarise`."""
    kept = {name: value for name, value in figures.items() if name not in NOT_REPRODUCIBLE}
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            trace_name=trace_name,
            command=command,
            seed=simulation.seed,
            lead=_lead(simulation, figures, trace_name),
            details=_details(simulation, figures) if figures["completed"] else "",
            notes=notes(figures),
            tiles=_tiles(figures),
            sections=(
                ("What users felt", user_figures(simulation, figures)),
                ("How the cluster coped", cluster_figures(simulation, figures)),
                ("KVCache and network", kvcache_figures(simulation, figures)),
            ),
            settings=_settings(simulation.config),
            instances=_instances(simulation),
            block=_block(simulation),
            figures=json.dumps(kept, indent=1, ensure_ascii=False),
        )
    )


def environment(package: str = __package__) -> Environment:
    """Returns the templates of a package. A template that the package lacks comes from this folder.
    All text in templates is escaped."""
    folders = [resources.files(package), resources.files(__package__)]

    def read(name: str) -> str:
        place = next(each for each in folders if each.joinpath(name).is_file())
        return place.joinpath(name).read_text(encoding="utf-8")

    load = FunctionLoader(read)
    templates = Environment(
        loader=load,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.globals["look"] = Markup(look())  # noqa: S704 - the package's own style sheet
    return templates


def _lead(simulation: Simulation, figures: dict[str, Any], trace_name: str) -> str:
    """Says what was simulated, and how many requests were answered within the SLOs."""
    config = simulation.config
    cluster = config.cluster
    sent = f"{_were(cluster.prefill + cluster.decode + cluster.mixed)} sent"
    if not figures["requests"]:
        return f"{describe_cluster(config)} {sent} no request at all: {trace_name} has none."
    return (
        f"{describe_cluster(config)} {sent} the {counted(figures['requests'], 'request')} of "
        f"{trace_name} within {duration(simulation.last_arrival_s)}. {_outcome(config, figures)}"
    )


def describe_cluster(config: Config) -> str:
    """Returns the cluster in words, such as `1 mixed instance, 8 x A800-SXM with llama3-70b,`."""
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


def _outcome(config: Config, figures: dict[str, Any]) -> str:
    slo = config.slo.usual
    completed, refused, failed = (figures[name] for name in ("completed", "rejected", "failed"))
    answered, of_all = f"{completed:,} {_were(completed)} answered", " of all"
    if completed == figures["requests"]:
        answered, of_all = "All were answered", ""
    elif not completed:
        answered = "None was answered"
    lost = [f"{refused:,} {_were(refused)} refused"] if refused else []
    if failed:
        lost.append(f"{failed:,} failed")
    end = f"{joined(lost)}." if lost else "none was refused."
    levels = f"TTFT{GAP}≤{GAP}{duration(slo.ttft_s)}, TBT{GAP}≤{GAP}{duration(slo.tbt_s)}"
    if figures.get("slo_classes"):
        levels = "those of its class"
    share = percent(figures["effective_share"])
    return f"{answered}, {share}{of_all} within both SLOs ({levels}); {end}"


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
        f"{joined(busy)}."
    )


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _tiles(figures: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """Returns (name, value, remark) of each key figure."""
    ttft, tbt = figures["ttft_s"], figures["tbt_top10_mean_s"]
    refused = figures["rejected"] / max(figures["requests"], 1)

    def seconds(value: float) -> str:
        return duration(value) if figures["completed"] else "-"

    return (
        ("requests", f"{figures['requests']:,}", f"{figures['completed']:,} answered"),
        (
            "SLOs kept",
            percent(figures["effective_share"]),
            f"{figures['effective']:,} requests",
        ),
        ("goodput", f"{significant(figures['goodput_rps'])}{GAP}/s", "within SLOs, per second"),
        ("TTFT, median", seconds(ttft["p50"]), f"p99 {seconds(ttft['p99'])}"),
        ("TBT, median", seconds(tbt["p50"]), f"p99 {seconds(tbt['p99'])}"),
        ("cached", percent(figures["cache"]["hit_ratio"]), "of prompt tokens"),
        ("refused", f"{figures['rejected']:,}", percent(refused)),
        ("failed", f"{figures['failed']:,}", "deadline or fault"),
        *_price(figures),
    )


def _price(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the price of the instances, if all devices have a price."""
    usd = figures.get("usd")
    if usd is None:
        return []
    hours = sum(figures["instance_hours"].values())
    remark = f"{significant(hours)} instance hours"
    if figures["effective"]:
        remark = f"{significant(1000 * usd / figures['effective'])} per 1,000 within both SLOs"
    return [("price in USD", f"{usd:,.2f}", remark)]


def _settings(config: Config) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Returns (key, TOML value, differs from the default) for each setting, by table of the
    configuration."""
    given = msgspec.to_builtins(config)
    default = msgspec.to_builtins(parse_config("", defaults=DEFAULTS))
    keys = {name: list(given[name]) for name in CONFIG_TABLES} | {"api": ["request_timeout_s"]}
    return [
        (
            f"[{name}]",
            [
                (key, _toml(given[name][key]), given[name][key] != default[name][key])
                for key in chosen
                if (name, key) not in LIVE_ONLY
            ],
        )
        for name, chosen in keys.items()
    ]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _instances(simulation: Simulation) -> Table:
    hardware, layout = simulation.hardware, simulation.hardware.layout
    rows = []
    for role in Role:
        number = sum(node.info.role is role for node in simulation.nodes.values())
        if not number:
            continue
        node = hardware.of_role(role)
        pool_bytes = node.num_blocks * layout.block_bytes
        rows.append(
            (
                counted(number, f"{role.value} instance"),
                f"{node.num_blocks * layout.block_tokens:,} tokens ({byte_size(pool_bytes)})",
                f"{node.engine_tokens:,} tokens" if node.engine_tokens else "-",
                f"{byte_size(node.nic_bytes_per_s)}/s each way",
                f"{byte_size(node.pcie_bytes_per_s)}/s",
                str(node.ground_truth.num_stages),
            )
        )
    head = ("", "Pool in DRAM", "KVCache in accelerators", "Network", "PCIe", "Pipeline stages")
    return Table(head, rows)


def _block(simulation: Simulation) -> str:
    layout = simulation.hardware.layout
    return (
        f"A block is {layout.block_tokens} tokens, {byte_size(layout.block_bytes)} of KVCache "
        f"over {layout.num_layers} layers."
    )
