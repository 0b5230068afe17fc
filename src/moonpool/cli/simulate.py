"""`moonpool simulate`: replays a trace in simulated time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.inputs import read_text, report_skipped
from moonpool.cli.options import (
    FACTOR,
    POLICY_KEYS,
    ConfigFlags,
    NumberRange,
    SectionedCommand,
    capped_answers_option,
    catalogue_option,
    config_option,
    fail_config,
    json_option,
    noise_option,
    requests_option,
    scale_option,
    speed_option,
    trace_format_option,
    trace_option,
)
from moonpool.cli.output import check_folders, fail, one_line, write_json, write_page
from moonpool.cli.progress import follow
from moonpool.config.parse import parse_config
from moonpool.config.schema import Values
from moonpool.config.tables import Config, ConfigError
from moonpool.sim.defaults import DEFAULTS
from moonpool.studies.cluster import cluster_config

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.trace.row import TraceInfo, TraceRow

CLUSTER_KEYS = (
    "cluster.prefill",
    "cluster.decode",
    "cluster.mixed",
    "cluster.attention",
    "attention.own_tokens",
    *POLICY_KEYS,
    "slo.ttft_s",
    "slo.tbt_s",
    "pool.block_tokens",
    "pool.dram_tokens_per_instance",
    "pool.ssd_tokens_per_instance",
    "engine.chunk_tokens",
    "engine.max_sequences",
    "engine.speculative_config",
    "engine.pipeline_parallel_size",
    "engine.decode_pipeline_parallel_size",
    "engine.tensor_parallel_size",
    "engine.decode_tensor_parallel_size",
    "model.quantization",
    "model.kv_cache_dtype",
    "hardware.cost",
    "hardware.device",
    "hardware.shape",
    "hardware.devices_per_node",
    "hardware.nodes_per_prefill",
    "hardware.parallelism",
    "hardware.draft_acceptance",
    "hardware.decode_device",
    "hardware.decode_devices_per_node",
    "hardware.attention_device",
    "hardware.attention_devices_per_node",
)
"""Keys that describe a simulated cluster: its instances, policies and hardware."""
CLUSTER_DEFAULTS = parse_config("", {}, DEFAULTS)
SIMULATE_FLAGS = ConfigFlags(*CLUSTER_KEYS, "slo.classes", "conductor.seed")
MAX_INSTANT_S = 1e9
RUN_OPTIONS = (
    *("speed", "requests", "trace_format", "noise", "prefill_belief", "decode_belief"),
    *("beliefs_file", "layer_wise", "capped_answers", "boot_s", "catalogue_file"),
)
"""Options that `RunSettings` takes as they are."""


@click.command(
    cls=SectionedCommand,
    screen=(
        "--trace",
        "--config",
        "--prefill",
        "--decode",
        "--mixed",
        "--device",
        "--kv-tokens",
        "--slo-ttft",
        "--slo-tbt",
        "--placement",
        "--admission",
        "--requests",
        "--speed",
        "--report",
        "--json",
    ),
)
@trace_option
@trace_format_option
@config_option
@SIMULATE_FLAGS.options(CLUSTER_DEFAULTS)
@catalogue_option
@speed_option
@requests_option
@scale_option
@noise_option
@click.option(
    "--prefill-belief",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Estimated over true prefill time in the Conductor.",
)
@click.option(
    "--decode-belief",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Estimated over true decode time in the Conductor.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="NAME=FACTOR",
    help="This instance takes FACTOR times as long as its profile says.",
)
@click.option(
    "--drain",
    multiple=True,
    metavar="NAME=SECONDS",
    help="Drain this instance at this time: its requests end or move, its own blocks move.",
)
@click.option(
    "--restart",
    multiple=True,
    metavar="NAME=SECONDS",
    help="Drain this instance at this time, and start an empty one in its place.",
)
@click.option(
    "--tenant-share",
    multiple=True,
    metavar="NAME=SHARE",
    help="Share of an overloaded cluster for this tenant of the trace; all others have 1.",
)
@click.option(
    "--tenant-cache",
    multiple=True,
    metavar="NAME=SHARE",
    help="Most of each instance's cache that this tenant may have while others need room.",
)
@click.option(
    "--beliefs",
    "beliefs_file",
    type=click.Path(dir_okay=False),
    help="Use the errors of a live cluster's estimates; a file of `profile --beliefs`.",
)
@click.option(
    "--layer-wise/--no-layer-wise",
    default=True,
    show_default=True,
    help="Stream KVCache while it is computed, or afterwards.",
)
@capped_answers_option
@click.option(
    "--boot-s",
    type=NumberRange(min=0, max=86_400),
    default=120.0,
    show_default=True,
    help="Seconds until an instance that --autoscale starts can serve.",
)
@json_option
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False),
    help="Write an HTML page about the run to this file.",
)
def simulate(
    trace_file: str,
    config_file: str | None,
    scale: Fraction,
    slow: tuple[str, ...],
    tenant_share: tuple[str, ...],
    tenant_cache: tuple[str, ...],
    drain: tuple[str, ...],
    restart: tuple[str, ...],
    json_file: str | None,
    report_file: str | None,
    **options: Any,
) -> None:
    """Replay a trace against a simulated cluster.

    The code that serves decides; only time and computation are simulated. Without options the
    cluster has 8 prefill and 8 decode nodes of 8 x A800 with LLaMA3-70B.
    """
    from moonpool.cli.figures import print_figures
    from moonpool.studies.run import RunSettings, run_simulation
    from moonpool.trace.row import TraceError

    run = {name: options[name] for name in RUN_OPTIONS}
    config = read_cluster(config_file, SIMULATE_FLAGS.overrides(options))
    check_folders(json_file, report_file)
    settings = RunSettings(
        slow=_read_factors(slow, "--slow", "FACTOR, such as prefill-0=2"),
        tenant_share=_read_factors(tenant_share, "--tenant-share", "SHARE, such as sales=2"),
        tenant_cache=_read_factors(tenant_cache, "--tenant-cache", "SHARE, such as bulk=0.2", 1.0),
        drain=_read_instants(drain, "--drain"),
        restart=_read_instants(restart, "--restart"),
        scale_tokens=scale,
        **run,
    )
    with one_line(TraceError, ConfigError):
        result = run_simulation(
            trace_file, config, settings, watch=_with_progress, keep_requests=False
        )
    print_figures(result.summary, result.simulation)
    write_json(json_file, result.summary)
    if report_file is not None:
        write_page(report_file, result.html(" ".join(["moonpool", *sys.argv[1:]])))
        click.echo(f"report: {report_file}")


def read_cluster(config_file: str | None, overrides: Values) -> Config:
    """Returns the paper's cluster, changed by file and flags. Ends the command on a mistake."""
    text = "" if config_file is None else read_text(config_file, "the config")
    try:
        return cluster_config(config_file, overrides)
    except ConfigError as error:
        fail_config(error, text, config_file)


def _read_instants(values: tuple[str, ...], option: str) -> dict[str, float]:
    instants: dict[str, float] = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            at_s = float(text)
        except ValueError:
            at_s = -1.0
        if not 0.0 <= at_s <= MAX_INSTANT_S:
            fail(
                f"{option} {value}: must be NAME=SECONDS since the beginning, such as prefill-0=60"
            )
        instants[name] = at_s
    return instants


def _read_factors(
    values: tuple[str, ...], option: str, form: str, most: float = 100.0
) -> dict[str, float]:
    factors: dict[str, float] = {}
    for value in values:
        name, _, text = value.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not name or not 0.01 <= factor <= most:
            fail(f"{option} {value}: must be NAME={form}, from 0.01 to {most:g}")
        factors[name] = factor
    return factors


def _with_progress(rows: Iterator[TraceRow], info: TraceInfo) -> Iterator[TraceRow]:
    report_skipped(info)
    requests = click.get_current_context().params["requests"]
    return follow(rows, min(info.num_rows, requests or sys.maxsize), "simulating")
