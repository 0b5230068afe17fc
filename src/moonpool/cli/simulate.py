"""`moonpool simulate`: replays a trace in simulated time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.inputs import open_catalogue_and_profile, read_text, report_skipped, trace_digest
from moonpool.cli.options import (
    FACTOR,
    POLICY_KEYS,
    ConfigFlags,
    NumberRange,
    SectionedCommand,
    catalogue_option,
    config_option,
    json_option,
    read_config,
    requests_option,
    scale_option,
    trace_option,
)
from moonpool.cli.output import check_folders, fail, write_json
from moonpool.config import Config, ConfigError, parse_config
from moonpool.config_schema import Values
from moonpool.gc_tuning import rare_collections
from moonpool.sim.defaults import DEFAULTS
from moonpool.types import Role

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.cost.recorded import CostEstimatorRecord

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
"""What describes a simulated cluster: its instances, policies and hardware."""
CLUSTER_DEFAULTS = parse_config("", {}, DEFAULTS)
SIMULATE_FLAGS = ConfigFlags(*CLUSTER_KEYS, "conductor.seed")
MAX_INSTANT_S = 1e9

RUN_PARAMETERS = (
    "speed",
    "noise",
    "prefill_belief",
    "decode_belief",
    "slow",
    "drain",
    "restart",
    "beliefs_file",
    "layer_wise",
    "capped_answers",
    "boot_s",
    "catalogue_file",
)
"""What a run depends on besides its configuration and seed; `--json` lists it."""


@click.command(cls=SectionedCommand)
@trace_option
@config_option
@SIMULATE_FLAGS.options(CLUSTER_DEFAULTS)
@catalogue_option
@click.option(
    "--speed",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Replay the trace this many times faster.",
)
@requests_option
@scale_option
@click.option(
    "--noise",
    type=NumberRange(min=0, max=0.99),
    default=0.0,
    show_default=True,
    help="Largest share by which a step departs from its true cost.",
)
@click.option(
    "--prefill-belief",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Factor by which the Conductor misjudges prefill times.",
)
@click.option(
    "--decode-belief",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Factor by which the Conductor misjudges decode times.",
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
    help="Drain this instance then: its requests end or move, and it hands over its own blocks.",
)
@click.option(
    "--restart",
    multiple=True,
    metavar="NAME=SECONDS",
    help="Drain this instance then, and let an empty one join in its place.",
)
@click.option(
    "--beliefs",
    "beliefs_file",
    type=click.Path(dir_okay=False),
    help="Misjudge times as a live cluster did: the file that `profile --beliefs-of` wrote.",
)
@click.option(
    "--layer-wise/--no-layer-wise",
    default=True,
    show_default=True,
    help="Stream KVCache while it is computed, or afterwards.",
)
@click.option(
    "--capped-answers",
    is_flag=True,
    help="Let clients cap each answer at the length it has, as `replay` does.",
)
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
    catalogue_file: str | None,
    speed: float,
    requests: int | None,
    scale: Fraction,
    noise: float,
    prefill_belief: float,
    decode_belief: float,
    slow: tuple[str, ...],
    drain: tuple[str, ...],
    restart: tuple[str, ...],
    beliefs_file: str | None,
    layer_wise: bool,
    capped_answers: bool,
    boot_s: float,
    json_file: str | None,
    report_file: str | None,
    **flags: Any,
) -> None:
    """Replay a trace against a simulated cluster.

    The Conductor and the instances are those that serve; only time and computation are simulated.
    Without options the cluster has 8 prefill and 8 decode nodes of 8 x A800 with LLaMA3-70B, and
    the SLOs are TTFT <= 30 s and TBT <= 0.1 s.
    """
    from moonpool.cli.figures import print_figures
    from moonpool.sim.outcome import summarise
    from moonpool.sim.report.page import render_report
    from moonpool.sim.simulation import Simulation
    from moonpool.sim.workload import make_arrivals
    from moonpool.trace.reader import open_trace
    from moonpool.trace.row import TraceError
    from moonpool.trace.transform import scale_trace

    config = read_cluster(config_file, SIMULATE_FLAGS.overrides(flags))
    check_folders(json_file, report_file)
    began_s = time.perf_counter()
    try:
        trace = scale_trace(open_trace(trace_file, limit=requests, speed=speed), scale)
        report_skipped(trace.info)
        hardware = open_hardware(config, catalogue_file, prefill_belief, decode_belief)
        simulation = Simulation(
            config,
            hardware,
            config.conductor.seed,
            noise,
            layer_wise,
            slow=_read_slow(slow),
            drains=_read_instants(drain, "--drain"),
            restarts=_read_instants(restart, "--restart"),
            recorded=_read_beliefs(beliefs_file),
            capped=capped_answers,
            boot_s=boot_s,
        )
        rows = _with_progress(trace, min(trace.info.num_rows, requests or sys.maxsize))
        sizes = (trace.info.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
        with rare_collections():
            simulation.run(make_arrivals(rows, *sizes))
    except (TraceError, ConfigError) as error:
        fail(str(error))
    figures = summarise(simulation, time.perf_counter() - began_s)
    named = {"trace": Path(trace_file).name, "trace_sha256": trace_digest(trace_file)}
    figures["usd"] = _usd(config, catalogue_file, figures["instance_hours"])
    figures["run"] = named | _parameters()
    print_figures(figures, simulation)
    write_json(json_file, figures)
    if report_file is not None:
        _write_page(report_file, render_report(simulation, figures, _command(), named["trace"]))


def _parameters() -> dict[str, Any]:
    params = click.get_current_context().params
    named = {key: params[key] for key in RUN_PARAMETERS}
    return named | {"scale_tokens": str(params["scale"])}


def _command() -> str:
    return " ".join(["moonpool", *sys.argv[1:]])


def _usd(
    config: Config, catalogue_file: str | None, instance_hours: dict[str, float]
) -> float | None:
    """The price of the instances; None where a device has none, or was measured."""
    from moonpool.cli.inputs import open_catalogue_and_profile
    from moonpool.sim.hardware.build import instance_usd_per_h
    from moonpool.sim.hardware.prices import parse_prices

    catalogue, profile = open_catalogue_and_profile(config, catalogue_file)
    if profile is not None:
        return None
    try:
        prices = instance_usd_per_h(config, parse_prices("", catalogue))
    except ConfigError:
        return None
    return round(sum(hours * prices[Role(role)] for role, hours in instance_hours.items()), 4)


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    click.echo(f"report: {path}")


_ROOFLINE_KEYS = ("device", "shape", "decode_device", "attention_device")
"""Flags for these mean the catalogue's hardware, not the node that was measured."""


def read_cluster(config_file: str | None, overrides: Values) -> Config:
    """Returns the paper's cluster, changed by file and flags. Ends the command on a mistake."""
    defaults = DEFAULTS
    cluster, hardware = overrides.get("cluster", {}), overrides.get("hardware", {})
    if cluster.get("mixed") and "prefill" not in cluster and "decode" not in cluster:
        # Instead of the paper's instances, but in addition to those that the file names.
        defaults = {**DEFAULTS, "cluster": {"prefill": 0, "decode": 0}}
    if "cost" not in hardware and any(name in hardware for name in _ROOFLINE_KEYS):
        hardware["cost"] = "roofline"
    return read_config(config_file, overrides, defaults)


def open_hardware(
    config: Config, catalogue_file: str | None, prefill_belief: float, decode_belief: float
) -> Any:
    """Raises ConfigError."""
    from moonpool.sim.hardware.build import build_hardware

    catalogue, profile = open_catalogue_and_profile(config, catalogue_file)
    return build_hardware(config, profile, catalogue, prefill_belief, decode_belief)


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


def _read_slow(values: tuple[str, ...]) -> dict[str, float]:
    slow: dict[str, float] = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not 0.01 <= factor <= 100.0:
            fail(f"--slow {value}: must be NAME=FACTOR, such as prefill-0=2, from 0.01 to 100")
        slow[name] = factor
    return slow


def _read_beliefs(path: str | None) -> CostEstimatorRecord | None:
    from moonpool.cost.recorded import RecordError, parse_beliefs

    if path is None:
        return None
    try:
        return parse_beliefs(read_text(path, "the beliefs"))
    except RecordError as error:
        fail(f"{path}: {error}")


def _with_progress(rows: Iterator[Any], total: int) -> Iterator[Any]:
    """Yields the rows, and draws a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from rows
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        for number, row in enumerate(rows):
            if number % 64 == 0:
                progress.update(task, completed=number)
            yield row
