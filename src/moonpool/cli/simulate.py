"""`moonpool simulate`: a trace through the Conductor and the instances that serve, in virtual
time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonpool.cli.output import COUNT, fail, write_json
from moonpool.cli.scale import check_folders, scale_option, tell_skipped
from moonpool.cli.settings import FlagKeys, read_config, read_text, show_defaults
from moonpool.config import (
    Admission,
    Batching,
    Config,
    ConfigError,
    DecodePrediction,
    EvictionName,
    Parallelism,
    Placement,
    RoleBalance,
    SsdAdmission,
    choices,
    parse_config,
)
from moonpool.runtime.settle import rare_collections
from moonpool.sim.defaults import DEFAULTS

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.cost.catalogue import Catalogue
    from moonpool.cost.fitted import FittedCost
    from moonpool.cost.recorded import BeliefRecord


FLAG_KEYS: FlagKeys = {
    "prefill": ("cluster", "prefill"),
    "decode": ("cluster", "decode"),
    "mixed": ("cluster", "mixed"),
    "attention": ("cluster", "attention"),
    "attention_own_tokens": ("attention", "own_tokens"),
    "placement": ("conductor", "placement"),
    "admission": ("conductor", "admission"),
    "role_balance": ("conductor", "role_balance"),
    "decode_prediction": ("conductor", "decode_prediction"),
    "load_limit": ("conductor", "load_limit"),
    "learning": ("conductor", "learning"),
    "kvcache_balancing_threshold": ("conductor", "kvcache_balancing_threshold"),
    "slo_ttft": ("slo", "ttft_s"),
    "slo_tbt": ("slo", "tbt_s"),
    "block_size": ("pool", "block_tokens"),
    "kv_tokens": ("pool", "dram_tokens_per_instance"),
    "ssd_tokens": ("pool", "ssd_tokens_per_instance"),
    "ssd_admission": ("pool", "ssd_admission"),
    "eviction": ("pool", "eviction"),
    "enable_prefix_caching": ("pool", "prefix_caching"),
    "max_num_batched_tokens": ("engine", "chunk_tokens"),
    "max_num_seqs": ("engine", "max_sequences"),
    "batching": ("engine", "batching"),
    "device": ("hardware", "device"),
    "shape": ("hardware", "shape"),
    "devices_per_node": ("hardware", "devices_per_node"),
    "nodes_per_prefill": ("hardware", "nodes_per_prefill"),
    "pipeline_parallel_size": ("engine", "pipeline_parallel_size"),
    "decode_pipeline_parallel_size": ("engine", "decode_pipeline_parallel_size"),
    "tensor_parallel_size": ("engine", "tensor_parallel_size"),
    "decode_tensor_parallel_size": ("engine", "decode_tensor_parallel_size"),
    "parallelism": ("hardware", "parallelism"),
    "decode_device": ("hardware", "decode_device"),
    "decode_devices_per_node": ("hardware", "decode_devices_per_node"),
    "attention_device": ("hardware", "attention_device"),
    "attention_devices_per_node": ("hardware", "attention_devices_per_node"),
}


class _Number(click.FloatRange):
    """As click's, but for NaN, which is neither above nor below a limit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


MAX_INSTANT_S = 1e9
FACTOR = _Number(min=0.01, max=100.0)


OF_THE_RUN = (
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
    "catalogue_file",
)
"""What a run depends on beside its configuration and seed; `--json` names it."""


def _hardware_options() -> list[Any]:
    return [
        click.option("--cost", help="The truth: a800-llama3-70b, roofline, or a profile's file."),
        click.option("--device", help="A device of the catalogue (with --cost roofline)."),
        click.option("--shape", help="A model shape of the catalogue."),
        click.option("--devices-per-node", type=int),
        click.option("--decode-device", help="Decode instances' device, if it is another."),
        click.option("--decode-devices-per-node", type=int),
        click.option(
            "--attention-device",
            help="Keeps the KVCache of decode instances and attends for them (Lamina).",
        ),
        click.option("--attention-devices-per-node", type=int),
        click.option("--nodes-per-prefill", type=int, help="Nodes joined to one prefill instance."),
        click.option("--parallelism", type=click.Choice(choices(Parallelism))),
        click.option(
            "--pipeline-parallel-size",
            type=int,
            help="Stages of a prefill or mixed instance, a node each.",
        ),
        click.option("--decode-pipeline-parallel-size", type=int, help="Of a decode instance."),
        click.option(
            "--tensor-parallel-size",
            type=int,
            help="Ranks of a prefill or mixed instance, a node each.",
        ),
        click.option("--decode-tensor-parallel-size", type=int, help="Of a decode instance."),
        click.option(
            "--catalogue",
            "catalogue_file",
            type=click.Path(dir_okay=False),
            help="TOML file with more devices, shapes and prices.",
        ),
    ]


def cluster_options(command: Any) -> Any:
    """What describes the cluster, its policies and its hardware."""
    options = [
        click.option("--config", "config_file", type=click.Path(dir_okay=False), help="TOML file."),
        click.option("--prefill", type=int, help="Prefill instances."),
        click.option("--decode", type=int, help="Decode instances."),
        click.option("--mixed", type=int, help="Instances that do both (colocated)."),
        click.option(
            "--attention",
            type=int,
            help="Workers that keep decode instances' KVCache (with --cost roofline or a profile).",
        ),
        click.option(
            "--attention-own-tokens",
            type=int,
            help="KVCache tokens that a decode instance keeps beside them (with a profile).",
        ),
        click.option("--placement", type=click.Choice(choices(Placement))),
        click.option("--admission", type=click.Choice(choices(Admission))),
        click.option(
            "--role-balance",
            type=click.Choice(choices(RoleBalance)),
            help="When the ratio of prefill to decode instances does not fit the load.",
        ),
        click.option(
            "--decode-prediction",
            type=click.Choice(choices(DecodePrediction)),
            help="How predictive admission expects answers to end.",
        ),
        click.option("--load-limit", type=float, help="Of predicted over promised latency."),
        click.option("--kvcache-balancing-threshold", type=float),
        click.option(
            "--learning/--no-learning",
            default=None,
            help="Believe instances' times as they are seen, or as profiled.",
        ),
        click.option("--slo-ttft", type=float, help="Seconds to the first token."),
        click.option("--slo-tbt", type=float, help="Seconds between tokens."),
        click.option("--block-size", type=int, help="Tokens of one KVCache block."),
        click.option("--kv-tokens", type=int, help="Tokens of KVCache pool per instance."),
        click.option("--ssd-tokens", type=int, help="Tokens of its SSD tier; 0: none."),
        click.option(
            "--ssd-admission",
            type=click.Choice(choices(SsdAdmission)),
            help="Which blocks are written to the SSD when they leave DRAM.",
        ),
        click.option("--eviction", type=click.Choice(choices(EvictionName))),
        click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None),
        click.option("--max-num-batched-tokens", type=int, help="Tokens of one step (the chunk)."),
        click.option("--max-num-seqs", type=int, help="Requests of one step."),
        click.option("--batching", type=click.Choice(choices(Batching))),
        *_hardware_options(),
    ]
    for option in reversed(options):
        command = option(command)
    return show_defaults(command, FLAG_KEYS, parse_config("", {}, DEFAULTS))


@click.command()
@click.option("--trace", "trace_file", required=True, help="Mooncake, Azure or BurstGPT trace.")
@cluster_options
@click.option(
    "--speed", type=FACTOR, default=1.0, show_default=True, help="Replay this much faster."
)
@click.option("--requests", type=COUNT, help="Only the first so many.")
@scale_option
@click.option("--seed", type=int, help="Of noise and random placement; 0 unless configured.")
@click.option(
    "--noise",
    type=_Number(min=0, max=0.99),
    default=0.0,
    show_default=True,
    help="Share by which each step departs from its true cost.",
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
    help="Factor by which it misjudges decode times.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="NAME=FACTOR",
    help="This instance takes so many times what its kind does, and nobody says so.",
)
@click.option(
    "--drain",
    multiple=True,
    metavar="NAME=SECONDS",
    help="This instance leaves then: its requests end or move, what only it has is handed over.",
)
@click.option(
    "--restart",
    multiple=True,
    metavar="NAME=SECONDS",
    help="The same, and an empty one joins in its place.",
)
@click.option(
    "--beliefs",
    "beliefs_file",
    type=click.Path(dir_okay=False),
    help="As wrong as a live cluster was: what `profile --beliefs-of` wrote.",
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
    help="Clients cap each answer at the length it has, as `replay` does.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures here."
)
@click.option(
    "--report", "report_file", type=click.Path(dir_okay=False), help="Write a page to read here."
)
def simulate(
    trace_file: str,
    config_file: str | None,
    cost: str | None,
    catalogue_file: str | None,
    speed: float,
    requests: int | None,
    scale: Fraction,
    seed: int | None,
    noise: float,
    prefill_belief: float,
    decode_belief: float,
    slow: tuple[str, ...],
    drain: tuple[str, ...],
    restart: tuple[str, ...],
    beliefs_file: str | None,
    layer_wise: bool,
    capped_answers: bool,
    json_file: str | None,
    report_file: str | None,
    **flags: Any,
) -> None:
    """Replay a trace against a simulated cluster: the same Conductor and instances that serve.

    Without options: 8 prefill and 8 decode nodes of 8 x A800 with LLaMA3-70B, TTFT <= 30 s,
    TBT <= 0.1 s.
    """
    from moonpool.cli.figures import print_figures
    from moonpool.report.page import render_report
    from moonpool.sim.outcome import summarise
    from moonpool.sim.simulation import Simulation
    from moonpool.sim.workload import make_arrivals
    from moonpool.trace.reader import open_trace
    from moonpool.trace.row import TraceError
    from moonpool.trace.scale import scale_trace

    config = read_cluster(config_file, flags, cost, seed)
    check_folders(json_file, report_file)
    began_s = time.perf_counter()
    try:
        trace = scale_trace(open_trace(trace_file, limit=requests, speed=speed), scale)
        tell_skipped(trace.info)
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
        )
        rows = with_progress(trace, min(trace.info.num_rows, requests or sys.maxsize))
        sizes = (trace.info.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
        with rare_collections():
            simulation.run(make_arrivals(rows, *sizes))
    except (TraceError, ConfigError) as error:
        fail(str(error))
    figures = summarise(simulation, time.perf_counter() - began_s)
    params = click.get_current_context().params
    of_the_run = {key: params[key] for key in OF_THE_RUN} | {"scale_tokens": str(scale)}
    figures["run"] = {"trace": Path(trace_file).name} | of_the_run
    print_figures(figures, simulation)
    write_json(json_file, figures)
    if report_file is not None:
        command = " ".join(["moonpool", *sys.argv[1:]])
        _write_page(report_file, render_report(simulation, figures, command, Path(trace_file).name))


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    click.echo(f"report: {path}")


ROOFLINE_FLAGS = ("device", "shape", "decode_device", "attention_device")
"""Whoever names one means the catalogue, not the node that was measured."""


def read_cluster(
    config_file: str | None, flags: dict[str, Any], cost: str | None, seed: int | None
) -> Config:
    """The paper's cluster, changed by file and flags. `cost` may name a profile's file."""
    defaults = DEFAULTS
    if flags["mixed"] and flags["prefill"] is None and flags["decode"] is None:
        # Instead of the paper's instances, but beside those that the file names.
        defaults = {**DEFAULTS, "cluster": {"prefill": 0, "decode": 0}}
    if cost is not None:
        flags["cost"] = cost
    elif any(flags[name] is not None for name in ROOFLINE_FLAGS):
        flags["cost"] = "roofline"
    flags["seed"] = seed
    keys = {**FLAG_KEYS, "cost": ("hardware", "cost"), "seed": ("conductor", "seed")}
    return read_config(config_file, flags, keys, defaults)


def open_hardware(
    config: Config, catalogue_file: str | None, prefill_belief: float, decode_belief: float
) -> Any:
    """Raises ConfigError."""
    from moonpool.sim.hardware import build_hardware

    catalogue, profile = open_parts(config, catalogue_file)
    return build_hardware(config, profile, catalogue, prefill_belief, decode_belief)


def open_parts(config: Config, catalogue_file: str | None) -> tuple[Catalogue, FittedCost | None]:
    """The files that a cluster's hardware is described by: catalogue, and profile if the config
    names one. Ends the command if they cannot be read."""
    from moonpool.cost.catalogue import BUILT_IN, parse_catalogue
    from moonpool.cost.profile import Profile

    catalogue = BUILT_IN
    if catalogue_file is not None:
        try:
            catalogue = parse_catalogue(read_text(catalogue_file, "the catalogue"))
        except ConfigError as error:
            fail(str(error))
    profile = None
    if config.hardware.cost.endswith(".json"):
        text = read_text(config.hardware.cost, "the profile")
        try:
            profile = msgspec.json.decode(text, type=Profile)
        except msgspec.DecodeError as error:
            fail(f"{config.hardware.cost} is no profile of `moonpool profile --json`: {error}")
        _check_profile(profile, config.hardware.cost)
    return catalogue, profile


def _check_profile(profile: FittedCost, path: str) -> None:
    times = (*profile.prefill, *profile.decode, profile.transfer_latency_s)
    if min(times) < 0:
        fail(f"{path} holds a negative time: measure it again with `moonpool profile --json`")
    if min(profile.shared_memory_bytes_per_s, profile.network_bytes_per_s) <= 0:
        fail(f"{path} holds a bandwidth of 0 or less: measure it again with `moonpool profile`")


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


def _read_beliefs(path: str | None) -> BeliefRecord | None:
    from moonpool.cost.recorded import RecordError, parse_beliefs

    if path is None:
        return None
    try:
        return parse_beliefs(read_text(path, "the beliefs"))
    except RecordError as error:
        fail(f"{path}: {error}")


def with_progress(rows: Iterator[Any], total: int) -> Iterator[Any]:
    """The rows as they are; on a terminal, a bar meanwhile."""
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
