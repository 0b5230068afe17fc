"""`moonpool plan`: the cheapest cluster that keeps the SLOs on a trace."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from moonpool.cli.inputs import read_rows
from moonpool.cli.options import (
    COUNT,
    FACTOR,
    ConfigFlags,
    SectionedCommand,
    attainment_option,
    catalogue_option,
    confidence_option,
    config_option,
    first_seed_option,
    json_option,
    processes_option,
    read_config,
    requests_option,
    scale_option,
    seeds_option,
    trace_format_option,
    trace_option,
)
from moonpool.cli.output import (
    check_folders,
    fail,
    need_package,
    one_line,
    origin,
    write_json,
    write_page,
    writing,
)
from moonpool.cli.plan_questions import Missing, on_terminal
from moonpool.config.parse import parse_config
from moonpool.config.tables import Config, ConfigError
from moonpool.pages.units import counted
from moonpool.plan.demand import Layout
from moonpool.plan.running_costs import costs_of
from moonpool.plan.tables import figures_of, print_check, print_offloading, print_plan
from moonpool.plan.time_left import share_done, time_words
from moonpool.plugins.entry_points import plot_function
from moonpool.sim.defaults import DEFAULTS
from moonpool.studies.planning import AskedPlan, ClusterSearch
from moonpool.studies.result_table import ResultTable

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.plan.advice import InstanceLossEffect
    from moonpool.plan.assess import Report
    from moonpool.plan.search import ClusterPlan

TABLE_SUFFIXES = (".csv", ".parquet")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_FLAGS = ConfigFlags(
    "slo.ttft_s",
    "slo.tbt_s",
    "slo.classes",
    "pool.block_tokens",
    "engine.max_sequences",
    "engine.speculative_config",
    "model.quantization",
    "model.kv_cache_dtype",
    "hardware.shape",
    "hardware.devices_per_node",
    "hardware.nodes_per_prefill",
    "hardware.draft_acceptance",
)


@click.command(
    cls=SectionedCommand,
    screen=(
        "--trace",
        "--slo-ttft",
        "--slo-tbt",
        "--shape",
        "--devices",
        "--prices",
        "--attainment",
        "--requests",
        "--time-limit",
        "--config",
        "--check",
        "--plot",
        "--page",
        "--table",
        "--json",
    ),
)
@trace_option
@trace_format_option
@config_option
@_FLAGS.options(parse_config("", {}, DEFAULTS))
@attainment_option
@click.option(
    "--devices",
    help="Devices of the catalogue, separated by commas; all mixes are tried. H100-SXM:4 is a node"
    " of four, H100-SXM any of 1, 2, 4, 8 on which the model fits; H100-SXM:2+H20:4 is a decode"
    " node of two with four for attention. Asked for on a terminal; else A800-SXM:8, the nodes of"
    " Mooncake's paper.",
)
@click.option(
    "--layout",
    type=click.Choice(get_args(Layout)),
    default="both",
    show_default=True,
    help="Prefill and decode on instances of their own, on the same instances, or all mixtures.",
)
@click.option(
    "--prices", "prices_file", help="TOML file with USD per hour of devices, of DRAM and of SSD."
)
@catalogue_option
@click.option(
    "--cost", help="Source of step times: a800-llama3-70b, roofline, or the file of a profile."
)
@click.option(
    "--max-power",
    "max_power_kw",
    type=click.FloatRange(min=0, min_open=True),
    default=float("inf"),
    metavar="KW",
    help="Most that the devices of the cluster may draw, by their data sheets, in kW.",
)
@confidence_option
@seeds_option
@click.option(
    "--runs",
    type=COUNT,
    default=400,
    show_default=True,
    help="Most simulations of the trace.",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=float("inf"),
    metavar="SECONDS",
    help="Most seconds of the search, and again of the page's runs; the best until then counts.",
)
@first_seed_option
@requests_option
@click.option(
    "--speed",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Plan for this many times the load of the trace.",
)
@scale_option
@processes_option
@click.option("--check", is_flag=True, help="Simulate the choice on fresh draws of the trace.")
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="Draw the plan to a .png, .svg or .pdf file."
)
@click.option(
    "--page",
    "--report",
    "page",
    type=click.Path(dir_okay=False),
    help="Write an HTML page with sliders of load, SLOs, memory and machine over stored runs.",
)
@click.option(
    "--table",
    type=click.Path(dir_okay=False),
    help="Write all runs to a .csv or .parquet file.",
)
@json_option
def plan(
    trace_file: str,
    trace_format: str,
    prices_file: str | None,
    catalogue_file: str | None,
    cost: str | None,
    max_power_kw: float,
    config_file: str | None,
    devices: str | None,
    layout: Layout,
    requests: int | None,
    speed: float,
    scale: Fraction,
    processes: int | None,
    check: bool,
    plot: str | None,
    page: str | None,
    table: str | None,
    json_file: str | None,
    **options: Any,
) -> None:
    """Find the cheapest cluster that keeps the SLOs on a trace.

    The answer says what to buy, what the cluster costs, up to which load it keeps the SLOs, and
    what breaks first. The search simulates clusters of the named devices: prefill and decode
    instances, mixed ones and mixtures of all, with more or less DRAM and SSD, other chunk sizes and
    policies. On a terminal it asks for the model, service levels, devices and prices that were not
    given. Ctrl-C prints the best so far.
    """
    from moonpool.plan.assess import PlanGoal
    from moonpool.plan.simulation_pool import SimulationPool, SimulationPoolError, num_cores

    began_s = time.perf_counter()
    _check_files(plot, page, table, json_file)
    with one_line(ConfigError, SimulationPoolError):
        trace = read_rows(trace_file, requests, scale, speed, trace_format)
        missing = Missing(on_terminal())
        given = _given(missing, config_file, options)
        devices = missing.devices(devices)
        files = catalogue_file, prices_file
        asked = AskedPlan(devices, layout, cost, *files, max_power_kw, options["attainment"])
        reprice = partial(missing.prices, prices_file=prices_file)
        prepared, workload, priced = asked.prepared(*trace, given, reprice)
        missing.say(prices_file is None)
        names = ("attainment", "confidence", "seeds", "runs", "seed", "time_limit_s")
        goal = PlanGoal(*(options[name] for name in names))
        for reason in prepared.left_out:
            click.echo(f"left out: {reason}")
        with SimulationPool(workload, processes or num_cores()) as pool_of_runs:
            job = _Job(ClusterSearch(pool_of_runs, workload, prepared, goal, priced))
            figures = job.plan(plot)
            interrupted = figures["stopped"] == "interrupted"
            figures["plan_s"] = round(time.perf_counter() - began_s, 1)
            run = {"trace": Path(trace_file).name, "speed": speed, "scale_tokens": str(scale)}
            figures["run"] = run | {"devices": devices, "layout": layout}
            if check and not interrupted:
                figures["check"] = job.check()
            if (page or table) and not interrupted:
                job.write_runs(figures, page, table)
    figures["wall_s"] = round(time.perf_counter() - began_s, 1)
    figures["cpu_s"] = _cpu_s()
    checked = f", {figures['wall_s']:.0f} s with its check" if check else ""
    runs = counted(round(figures["runs"]), "run")
    click.echo(
        f"\n{runs} of the whole trace in {figures['plan_s']:.0f} s{checked};"
        f" {figures['cpu_s']:.0f} s of CPU time"
    )
    write_json(json_file, figures | {"origin": origin()})
    if interrupted:
        raise SystemExit(130)


def _given(missing: Missing, config_file: str | None, options: dict[str, Any]) -> Config:
    """Returns the configuration, with answers for missing values."""
    overrides = _FLAGS.overrides(options)
    known = read_config(config_file, overrides, {"hardware": {"shape": ""}})
    shape = {"shape": missing.shape(known.hardware.shape)}
    overrides["hardware"] = overrides.get("hardware", {}) | shape
    overrides["slo"] = overrides.get("slo", {}) | missing.slo(known.slo).get("slo", {})
    return read_config(config_file, overrides, DEFAULTS)


class _Job:
    """One plan, and the check of it."""

    def __init__(self, search: ClusterSearch) -> None:
        self._search = search
        self._prepared, self._goal, self._priced = search.prepared, search.goal, search.priced
        self._found: ClusterPlan | None = None
        self._fewer: Sequence[InstanceLossEffect] = ()

    def plan(self, plot: str | None) -> dict[str, Any]:
        """Searches, prints, draws; returns the figures. Raises ConfigError."""
        from moonpool.plan.answer import answer

        prepared, goal = self._prepared, self._goal
        slo, wanted = prepared.base.slo.usual, goal.wanted
        with _progress(goal.max_runs) as tell:
            tell("running the trace on a first cluster", 0.0, None)
            found, fewer = self._search.find(tell)
        self._found, self._fewer = found, fewer
        words = answer(found, fewer, goal, prepared, self._priced)
        print_plan(found, words, wanted, costs_of(found.choice, prepared, self._priced))
        if plot is not None:
            with writing(plot):
                plot_function("plan")(found, wanted, slo, Path(plot))
        figures = figures_of(found, fewer, words, self._prepared, self._goal, self._priced)
        return figures | self._offloading(found)

    def _offloading(self, found: ClusterPlan) -> dict[str, Any]:
        """Says whether offloading pays, if the devices named offer it. Raises ConfigError."""
        from moonpool.plan.offloading import decode_nodes_of, verdict

        starts = self._prepared.starts
        kinds = list(dict.fromkeys(start.decode_kind for start in starts))
        if not any(kind.offloads for kind in kinds):
            return {}
        nodes = decode_nodes_of(
            kinds,
            self._prepared.base,
            self._search.workload.catalogue,
            self._priced.prices,
            self._prepared.context_tokens,
        )
        return print_offloading(verdict(found), nodes, self._prepared)

    def check(self) -> dict[str, Any]:
        """Raises ConfigError."""
        from moonpool.plan.assess import FRESH_SEEDS_FROM, StoppedError
        from moonpool.plan.assess import check as check_choice

        choice = None if self._found is None else self._found.choice
        if choice is None:
            return {}
        seed = self._goal.first_seed + FRESH_SEEDS_FROM
        fresh = msgspec.structs.replace(self._goal, first_seed=seed, time_limit_s=float("inf"))
        try:
            with _progress(self._goal.max_runs) as tell:
                found = check_choice(choice, self._search.assessor(fresh, tell))
        except StoppedError:
            fail("the check needs more simulations than --runs allows: give it more")
        return print_check(found)

    def write_runs(self, figures: dict[str, Any], page: str | None, table: str | None) -> None:
        """Runs the clusters of the page at several loads, and writes page and table."""
        from moonpool.plan.answer import answer
        from moonpool.plan.page import render_plan
        from moonpool.plan.stored_runs import COLUMNS, run_rows, with_room

        assert self._found is not None
        goal, prepared = self._goal, self._prepared
        with _progress(goal.max_runs) as tell:
            stored = self._search.store(self._found, tell)
        plan = with_room(self._found, stored, goal.wanted)
        words = answer(plan, self._fewer, goal, prepared, self._priced)
        figures = figures | words.figures()
        command = " ".join(["moonpool", *sys.argv[1:]])
        if page is not None:
            text = render_plan(plan, stored, figures, prepared, self._priced, command)
            write_page(page, text)
        if table is not None:
            rows = list(run_rows(self._found, stored, self._priced))
            with writing(table):
                ResultTable.from_rows(COLUMNS, rows).write(table)
        for written in filter(None, (page, table)):
            click.echo(f"written: {written}")


def _check_files(
    plot: str | None, page: str | None, table: str | None, json_file: str | None
) -> None:
    """Ends the command, before its work, where a file cannot be written or a package is absent."""
    check_folders(plot, page, table, json_file)
    need_package("scipy")
    if table is not None:
        if Path(table).suffix.lower() not in TABLE_SUFFIXES:
            fail(f"cannot write {table}: its name must end in {' or '.join(TABLE_SUFFIXES)}")
        if Path(table).suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
            fail("a .parquet file needs pyarrow (pip install pyarrow); a .csv file needs nothing")
    if plot is None:
        return
    plot_function("plan")
    if Path(plot).suffix.lower() not in PLOT_SUFFIXES:
        fail(f"cannot draw {plot}: its name must end in {', '.join(PLOT_SUFFIXES)}")


def _cpu_s() -> float:
    """Returns CPU seconds of this process and of its simulating processes, which tell more than the
    clock if others use the machine, too."""
    used = os.times()
    return round(used.user + used.system + used.children_user + used.children_system, 1)


LOG_EVERY_S = 15.0


@contextmanager
def _progress(total: float) -> Iterator[Report]:
    """Yields a function that shows the progress and about how long is left: on a terminal as a bar,
    elsewhere as a line per stage and every LOG_EVERY_S. `total`: the most runs."""
    began_s = last_s = time.monotonic()
    stages: set[str] = set()
    if not sys.stderr.isatty():

        def say(what: str, runs: float, left_s: float | None) -> None:
            nonlocal last_s
            now_s, stage = time.monotonic(), what.partition(",")[0]
            if stage not in stages or now_s - last_s > LOG_EVERY_S:
                last_s = now_s
                stages.add(stage)
                left = time_words(left_s)
                left = f", {left}" if left else ""
                word = "run" if runs == 1 else "runs"
                click.echo(f"{now_s - began_s:5.0f} s {runs:4.0f} {word}{left}: {what}", err=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(what: str, runs: float, left_s: float | None) -> None:
            share = share_done(time.monotonic() - began_s, left_s)
            text = f"{runs:.0f} of at most {total:.0f} runs {time_words(left_s)} {what}"
            bar.update(task, completed=share, description=text)

        yield show
