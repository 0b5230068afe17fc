"""Finds the cheapest cluster for a trace, for `moonpool.plan_cluster` and `moonpool plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    from moonpool.plan.assess import Assessor, PlanGoal
    from moonpool.plan.demand import Prepared
    from moonpool.plan.search import ClusterPlan
    from moonpool.plan.simulation_pool import SimulationPool
    from moonpool.plan.stored_runs import StoredRun
    from moonpool.plan.trial import Workload
    from moonpool.sim.report.drawing import Drawing
    from moonpool.trace.row import TraceRow


class PlanResult:
    """`summary` are the figures of `moonpool plan --json`. `search`: what was simulated for it."""

    def __init__(self, summary: dict[str, Any], search: SearchDone) -> None:
        self.summary = summary
        self.search = search

    def __repr__(self) -> str:
        return f"<PlanResult: {self.advice}>"

    def _repr_html_(self) -> str:
        """The answer, for notebooks."""
        from moonpool.studies.notebook_html import pairs_html

        parts = {part["label"] or "Answer": part["text"] for part in self.summary["answer"]}
        return pairs_html(f"Plan for {self.summary['run']['trace']}", parts)

    @cached_property
    def runs(self) -> ResultTable:
        """One row per simulation of the trace: the search's, and those of `what_if`."""
        from moonpool.plan.stored_runs import COLUMNS, run_rows

        done = self.search
        return ResultTable.from_rows(COLUMNS, list(run_rows(done.found, done.stored, done.priced)))

    def plot(self) -> Drawing:
        """Attainment of the simulated clusters over their price."""
        from moonpool.plan.page import attainment_by_price
        from moonpool.studies.notebook_html import drawn

        return drawn(attainment_by_price(self.search.found, self.summary["goal"]["wanted"]))

    def html(self, command: str = "moonpool.plan_cluster(...)") -> str:
        """The page of `plan --page` as text; its sliders need the runs of `what_if=True`."""
        from moonpool.plan.page import render_plan

        done = self.search
        return render_plan(
            done.found, done.stored, self.summary, done.prepared, done.priced, command
        )

    def report(self, path: str | Path, command: str = "moonpool.plan_cluster(...)") -> None:
        """Writes that page. Raises OSError."""
        Path(path).write_text(self.html(command), encoding="utf-8")

    @property
    def advice(self) -> str:
        """The plan in one sentence."""
        return str(self.summary["advice"])

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The cheapest cluster as tables for `moonpool.simulate(config=...)`. Raises ValueError
        if no cluster kept the SLOs."""
        if self.summary["config"] is None:
            raise ValueError(f"no cluster keeps the SLOs: {self.advice}")
        tables: dict[str, dict[str, Any]] = self.summary["config"]
        return tables


class SearchDone(NamedTuple):
    """A search that has ended, and what it searched with."""

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
    """Finds the cheapest cluster that keeps the SLOs on a trace, as `moonpool plan` does.

    `what_if` also simulates clusters at other loads, which the sliders of its page need. `progress`
    shows a line of progress; None: in notebooks.
    More than one of `processes` are spawned: a script that asks for them needs
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
    base, kinds = base_and_kinds(cluster_config(config, {"slo": given}), devices, cost)
    rows = open_scaled(trace, requests, speed, as_share(scale_tokens), trace_format)
    workload, priced = priced_workload(
        tuple(rows), rows.info.block_tokens, base, kinds, catalogue_file, prices_file, max_power_kw
    )
    kinds = with_rivals(kinds, priced.prices)
    prepared = prepare(workload, base, kinds, priced, attainment, layout)
    goal = PlanGoal(attainment, confidence, seeds, runs, seed, time_limit_s)
    with SimulationPool(workload, processes) as pool_of_runs, ProgressLine(progress) as line:
        search = _Search(pool_of_runs, workload, prepared, goal, priced, line)
        done, fewer = search.run(what_if)
    plan = with_room(done.found, done.stored, attainment)
    words = answer(plan, fewer, goal, prepared, priced)
    figures = figures_of(done.found, fewer, words, prepared, goal, priced)
    run = {"speed": speed, "scale_tokens": str(scale_tokens), "devices": devices, "layout": layout}
    return PlanResult(figures | {"run": named_trace(trace) | run}, done)


class _Search(NamedTuple):
    """A search to run, with a line of its progress."""

    pool_of_runs: SimulationPool
    workload: Workload
    prepared: Prepared
    goal: PlanGoal
    priced: Priced
    line: ProgressLine

    def run(self, what_if: bool) -> tuple[SearchDone, list[InstanceLossEffect]]:
        """Returns what was found, and what one instance fewer breaks. Raises ConfigError."""
        from moonpool.plan.advice import broken_by_fewer
        from moonpool.plan.bounds import Bounds
        from moonpool.plan.search import Planner
        from moonpool.plan.stored_runs import stored_runs

        assessor = self._assessor()
        bounds = Bounds(self.workload, self.prepared.base, self.prepared.demand)
        found = Planner(assessor, self.prepared, bounds).plan()
        fewer = broken_by_fewer(found.neighbours if found.complete else (), assessor.in_full)
        steps = self.prepared.steps
        stored = stored_runs(found, self._assessor(), steps) if what_if else []
        return SearchDone(found, stored, self.prepared, self.priced), fewer

    def _assessor(self) -> Assessor:
        from moonpool.plan.assess import Assessor
        from moonpool.plan.time_left import time_words

        def report(what: str, done: float, left_s: float | None) -> None:
            share = 1.0 / (1.0 + found.time_left.runs(done) / max(done, 1.0))
            self.line.show(share, f"{done:.0f} runs, {time_words(left_s)}: {what}")

        found = Assessor(self.pool_of_runs, self.prepared.base, self.goal, self.priced, report)
        return found


def base_and_kinds(base: Config, devices: str, cost: str | None) -> tuple[Config, list[NodeKind]]:
    """The configuration that all candidates change, and the nodes that `devices` names. Raises
    ConfigError."""
    names = [name.strip() for name in devices.split(",") if name.strip()]
    kinds = [kind for name in names for kind in _node_kinds(name, base)]
    if not kinds:
        raise ConfigError("--devices names none: give one or more of the catalogue, with commas")
    return truth_for(base, list(dict.fromkeys(kinds)), cost), list(dict.fromkeys(kinds))


def _node_kinds(text: str, base: Config) -> list[NodeKind]:
    """Returns the kind of node, or those of all sizes where no number is given."""
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


def priced_workload(
    rows: tuple[TraceRow, ...],
    block_tokens: int,
    base: Config,
    kinds: list[NodeKind],
    catalogue_file: str | None,
    prices_file: str | None,
    max_power_kw: float = inf,
) -> tuple[Workload, Priced]:
    """What candidates are simulated with, and what they cost. Raises ConfigError."""
    from moonpool.plan.trial import Workload
    from moonpool.sim.hardware.build import decode_nodes, prefill_nodes
    from moonpool.sim.hardware.formats import in_formats

    catalogue, profile = read_catalogue_and_profile(base, catalogue_file)
    if profile is not None and len(kinds) > 1:
        raise ConfigError("a profile was measured on one kind of node: name one of --devices")
    text = "" if prices_file is None else read_text_file(prices_file, "the price file")
    prices = parse_prices(text, catalogue)
    kv_bytes = in_formats(catalogue.shape(base.hardware.shape), base.model).kv_bytes_per_token
    workload = Workload(rows, block_tokens, catalogue, profile)
    stages = base.engine.pipeline_parallel_size  # which each candidate counts itself
    prefills = prefill_nodes(base).nodes_per_prefill // stages
    nodes = prefills, decode_nodes(base).nodes_per_prefill
    powers = {device.name: device.power_w for device in catalogue.devices if device.power_w}
    return workload, Priced(prices, kv_bytes, *nodes, powers, 1e3 * max_power_kw)
