"""Finds the cheapest cluster for a trace, for `moonpool.plan_cluster` and `moonpool plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.config.tables import Config, ConfigError
from moonpool.plan.candidate import NodeKind, Priced
from moonpool.plan.demand import Layout, prepare, truth_for
from moonpool.plan.offloading import with_rivals
from moonpool.sim.hardware.prices import parse_prices
from moonpool.studies.cluster import cluster_config
from moonpool.studies.hardware_files import read_catalogue_and_profile, read_text_file
from moonpool.studies.progress_line import ProgressLine
from moonpool.studies.result_table import ResultTable
from moonpool.studies.trace_rows import TraceRows, as_share, as_trace, named_trace, open_scaled

if TYPE_CHECKING:
    from moonpool.plan.advice import InstanceLossEffect
    from moonpool.plan.assess import Assessor, PlanGoal, Report
    from moonpool.plan.demand import Prepared
    from moonpool.plan.search import ClusterPlan
    from moonpool.plan.simulation_pool import SimulationPool
    from moonpool.plan.stored_runs import StoredRun
    from moonpool.plan.trial import Workload
    from moonpool.sim.report.drawing import Drawing
    from moonpool.trace.row import TraceRow


class PlanResult:
    """The result of a plan. `summary` has the figures of `moonpool plan --json`. `search` has the
    simulations behind the plan."""

    def __init__(self, summary: dict[str, Any], search: SearchDone) -> None:
        self.summary = summary
        self.search = search

    def __repr__(self) -> str:
        return f"<PlanResult: {self.advice}>"

    def _repr_html_(self) -> str:
        """Returns the answer as HTML, for notebooks."""
        from moonpool.studies.notebook_html import pairs_html

        parts = {part["label"] or "Answer": part["text"] for part in self.summary["answer"]}
        return pairs_html(f"Plan for {self.summary['run']['trace']}", parts)

    @cached_property
    def runs(self) -> ResultTable:
        """A table with one row per simulation of the trace, by the search or by `what_if`."""
        from moonpool.plan.stored_runs import COLUMNS, run_rows

        done = self.search
        return ResultTable.from_rows(COLUMNS, list(run_rows(done.found, done.stored, done.priced)))

    def plot(self) -> Drawing:
        """Draws the attainment of the simulated clusters over their price."""
        from moonpool.plan.page import attainment_by_price
        from moonpool.studies.notebook_html import drawn

        return drawn(attainment_by_price(self.search.found, self.summary["goal"]["wanted"]))

    def html(self, command: str = "moonpool.plan_cluster(...)") -> str:
        """Returns the page of `plan --page`, whose sliders need the runs of `what_if=True`."""
        from moonpool.plan.page import render_plan

        done = self.search
        return render_plan(
            done.found, done.stored, self.summary, done.prepared, done.priced, command
        )

    def report(self, path: str | Path, command: str = "moonpool.plan_cluster(...)") -> None:
        """Writes the page of `plan --page`. Raises OSError."""
        Path(path).write_text(self.html(command), encoding="utf-8")

    @property
    def advice(self) -> str:
        """The plan in one sentence."""
        return str(self.summary["advice"])

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Returns the cheapest cluster as tables for `moonpool.simulate(config=...)`. Raises
        ValueError if no cluster kept the SLOs."""
        if self.summary["config"] is None:
            raise ValueError(f"no cluster keeps the SLOs: {self.advice}")
        tables: dict[str, dict[str, Any]] = self.summary["config"]
        return tables


class SearchDone(NamedTuple):
    """A search that has ended, and its inputs."""

    found: ClusterPlan
    stored: Sequence[StoredRun]
    prepared: Prepared
    priced: Priced


def plan_cluster(
    trace: str | Path | TraceRows | Iterable[TraceRow],
    *,
    slo_ttft_s: float | None = None,
    slo_tbt_s: float | None = None,
    devices: str = "A800-SXM:8",
    layout: Layout = "both",
    config: str | Path | dict[str, dict[str, Any]] | Config | None = None,
    cost: str | None = None,
    catalogue_file: str | None = None,
    prices_file: str | None = None,
    max_power_kw: float = inf,
    attainment: float = 0.9,
    confidence: float = 0.95,
    seeds: int = 6,
    runs: int = 400,
    seed: int = 0,
    time_limit_s: float = float("inf"),
    requests: int | None = None,
    speed: float = 1.0,
    scale_tokens: str | float | Fraction = 1,
    trace_format: str = "auto",
    processes: int = 1,
    what_if: bool = False,
    progress: bool | None = None,
) -> PlanResult:
    """Finds the cheapest cluster that keeps the SLOs on a trace, like `moonpool plan`.

    `what_if` also simulates clusters at other loads, which the sliders of the page need. `progress`
    shows a line of progress; None shows the line only in notebooks.
    With more than one of `processes`, the call spawns processes, so a script needs
    `if __name__ == "__main__"` around the call. Raises ValueError (`TraceError`, `ConfigError`).
    """
    from moonpool.plan.answer import answer
    from moonpool.plan.assess import PlanGoal
    from moonpool.plan.simulation_pool import SimulationPool
    from moonpool.plan.stored_runs import with_room
    from moonpool.plan.tables import figures_of

    trace = as_trace(trace)
    slo = {"ttft_s": slo_ttft_s, "tbt_s": slo_tbt_s}
    given = {name: value for name, value in slo.items() if value is not None}
    base = cluster_config(config, {"slo": given})
    rows = open_scaled(trace, requests, speed, as_share(scale_tokens), trace_format)
    asked = AskedPlan(devices, layout, cost, catalogue_file, prices_file, max_power_kw, attainment)
    prepared, workload, priced = asked.prepared(tuple(rows), rows.info.block_tokens, base)
    goal = PlanGoal(attainment, confidence, seeds, runs, seed, time_limit_s)
    with SimulationPool(workload, processes) as pool_of_runs, ProgressLine(progress) as line:
        search = ClusterSearch(pool_of_runs, workload, prepared, goal, priced)
        tell = _teller(line)
        found, fewer = search.find(tell)
        stored = search.store(found, tell) if what_if else []
    plan = with_room(found, stored, attainment)
    words = answer(plan, fewer, goal, prepared, priced)
    figures = figures_of(found, fewer, words, prepared, goal, priced)
    run = {"speed": speed, "scale_tokens": str(scale_tokens), "devices": devices, "layout": layout}
    done = SearchDone(found, stored, prepared, priced)
    return PlanResult(figures | {"run": named_trace(trace) | run}, done)


class AskedPlan(NamedTuple):
    """The nodes and the prices that a plan is asked for."""

    devices: str
    layout: Layout
    cost: str | None
    catalogue_file: str | None
    prices_file: str | None
    max_power_kw: float
    attainment: float

    def prepared(
        self,
        rows: tuple[TraceRow, ...],
        block_tokens: int,
        given: Config,
        reprice: Callable[[Priced, list[NodeKind]], Priced] = lambda priced, kinds: priced,
    ) -> tuple[Prepared, Workload, Priced]:
        """Returns the start of a search. `reprice` may change the prices. Raises ConfigError."""
        base, kinds = _base_and_kinds(given, self.devices, self.cost)
        files = self.catalogue_file, self.prices_file
        workload, priced = _workload(rows, block_tokens, base, kinds, *files, self.max_power_kw)
        priced = reprice(priced, kinds)
        kinds = with_rivals(kinds, priced.prices)
        prepared = prepare(workload, base, kinds, priced, self.attainment, self.layout)
        return prepared, workload, priced


class ClusterSearch(NamedTuple):
    """A search for the cheapest cluster. The methods of the search raise ConfigError."""

    pool_of_runs: SimulationPool
    workload: Workload
    prepared: Prepared
    goal: PlanGoal
    priced: Priced

    def find(self, tell: Report) -> tuple[ClusterPlan, list[InstanceLossEffect]]:
        """Returns the plan, and the effects of one instance fewer, which are unknown if the search
        ends early."""
        from moonpool.plan.advice import broken_by_fewer
        from moonpool.plan.assess import StoppedError
        from moonpool.plan.bounds import Bounds
        from moonpool.plan.search import Planner

        assessor = self.assessor(self.goal, tell)
        bounds = Bounds(self.workload, self.prepared.base, self.prepared.demand)
        found = Planner(assessor, self.prepared, bounds).plan()
        try:
            around = found.neighbours if found.complete else ()
            return found, broken_by_fewer(around, assessor.in_full)
        except (StoppedError, KeyboardInterrupt):
            return found, []

    def store(self, found: ClusterPlan, tell: Report) -> list[StoredRun]:
        """Simulates the clusters of the plan's page at several loads."""
        from moonpool.plan.stored_runs import stored_runs

        return stored_runs(found, self.assessor(self.goal, tell), self.prepared.steps)

    def assessor(self, goal: PlanGoal, tell: Report) -> Assessor:
        from moonpool.plan.assess import Assessor

        return Assessor(self.pool_of_runs, self.prepared.base, goal, self.priced, tell)


def _teller(line: ProgressLine) -> Report:
    from moonpool.plan.time_left import share_done, time_words

    began_s = time.monotonic()

    def tell(what: str, runs: float, left_s: float | None) -> None:
        share = share_done(time.monotonic() - began_s, left_s)
        line.show(share, f"{runs:.0f} runs, {time_words(left_s)}: {what}")

    return tell


def _base_and_kinds(base: Config, devices: str, cost: str | None) -> tuple[Config, list[NodeKind]]:
    """Returns the configuration that all candidates change, and the nodes that `devices` names.
    Raises ConfigError."""
    names = [name.strip() for name in devices.split(",") if name.strip()]
    kinds = [kind for name in names for kind in _node_kinds(name, base)]
    if not kinds:
        raise ConfigError("--devices names none: give one or more of the catalogue, with commas")
    return truth_for(base, list(dict.fromkeys(kinds)), cost), list(dict.fromkeys(kinds))


def _node_kinds(text: str, base: Config) -> list[NodeKind]:
    """Returns the named kind of node, or the kinds of all sizes if `text` has no number."""
    own, plus, attention = text.partition("+")
    if plus:
        return [NodeKind(*_devices(own.strip(), base), *_devices(attention.strip(), base))]
    if ":" in own:
        return [NodeKind(*_devices(own, base))]
    most = base.hardware.devices_per_node
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    return [NodeKind(own, size) for size in (*sizes, most)]


def _devices(text: str, base: Config) -> tuple[str, int]:
    name, colon, number = text.partition(":")
    if not colon:
        return name, base.hardware.devices_per_node
    if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 64:
        raise ConfigError(
            f"--devices: {text!r} should be a device and how many a node has, 1 to 64"
        )
    return name, int(number)


def _workload(
    rows: tuple[TraceRow, ...],
    block_tokens: int,
    base: Config,
    kinds: list[NodeKind],
    catalogue_file: str | None,
    prices_file: str | None,
    max_power_kw: float,
) -> tuple[Workload, Priced]:
    """Returns the workload that candidates are simulated with, and their prices. Raises
    ConfigError."""
    from moonpool.plan.trial import Workload
    from moonpool.sim.hardware.build import decode_nodes, prefill_nodes
    from moonpool.sim.hardware.model_shapes import in_formats

    catalogue, profile = read_catalogue_and_profile(base, catalogue_file)
    if profile is not None and len(kinds) > 1:
        raise ConfigError("a profile was measured on one kind of node: name one of --devices")
    text = "" if prices_file is None else read_text_file(prices_file, "the price file")
    prices = parse_prices(text, catalogue)
    kv_bytes = in_formats(catalogue.shape(base.hardware.shape), base.model).kv_bytes_per_token
    workload = Workload(rows, block_tokens, catalogue, profile)
    stages = base.engine.pipeline_parallel_size  # each candidate counts its stages
    prefills = prefill_nodes(base).nodes_per_prefill // stages
    nodes = prefills, decode_nodes(base).nodes_per_prefill
    powers = {device.name: device.power_w for device in catalogue.devices if device.power_w}
    return workload, Priced(prices, kv_bytes, *nodes, powers, 1e3 * max_power_kw)
