"""Defines the public Python API: `moonpool.simulate`, and `moonpool.report` of several runs.

Names, parameters and columns are stable: releases may add some, and rename or remove them only with
an entry in the changelog. docs/python.md shows the API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from moonpool.config.tables import Config
from moonpool.studies.cluster import cluster_config
from moonpool.studies.progress_line import ProgressLine
from moonpool.studies.run import RunSettings, run_simulation
from moonpool.studies.simulation_result import SimulationResult
from moonpool.studies.trace_rows import TraceRows, as_share, as_trace
from moonpool.trace.row import TraceInfo, TraceRow

Tables = Mapping[str, Mapping[str, Any]]
"""A configuration as nested mappings: table, then key."""


def simulate(
    trace: str | Path | TraceRows | Iterable[TraceRow],
    *,
    config: str | Path | Tables | Config | None = None,
    placement: Any = None,
    admission: Any = None,
    eviction: Any = None,
    prefill: int | None = None,
    decode: int | None = None,
    mixed: int | None = None,
    slo_ttft_s: float | None = None,
    slo_tbt_s: float | None = None,
    seed: int | None = None,
    speed: float = 1.0,
    requests: int | None = None,
    scale_tokens: str | float | Fraction = 1,
    trace_format: str = "auto",
    progress: bool | None = None,
    **settings: Any,
) -> SimulationResult:
    """Replays a trace against a simulated cluster, like `moonpool simulate`.

    `trace` is a file, `TraceRows`, or requests in order of arrival: `TraceRow`s without hash_ids.
    `config` is a TOML file, tables, or a `Config`; the other parameters override it. A policy is a
    name, "module:Class", or an object: a class, a function, or an instance (docs/extending.md).
    `progress` shows a line of progress; None shows the line only in notebooks.
    `settings` are further fields of `RunSettings`, such as noise=0.05. Raises ValueError
    (`TraceError`, `ConfigError`) with one line about what is wrong.
    """
    objects = {
        key: policy
        for key, policy in (
            ("conductor.placement", placement),
            ("conductor.admission", admission),
            ("pool.eviction", eviction),
        )
        if policy is not None and not isinstance(policy, str)
    }
    values: dict[str, Any] = {
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "cluster.mixed": mixed,
        "slo.ttft_s": slo_ttft_s,
        "slo.tbt_s": slo_tbt_s,
        "conductor.seed": seed,
        "conductor.placement": _policy_name(placement),
        "conductor.admission": _policy_name(admission),
        "pool.eviction": _policy_name(eviction),
    }
    overrides: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        if value is not None:
            overrides.setdefault(table, {})[key] = value
    run = RunSettings(
        speed=speed,
        requests=requests,
        scale_tokens=as_share(scale_tokens),
        trace_format=trace_format,
        objects=objects,
        **settings,
    )
    with ProgressLine(progress) as line:
        watch = partial(_with_progress, line, requests)
        return run_simulation(as_trace(trace), cluster_config(config, overrides), run, watch)


def _with_progress(
    line: ProgressLine, limit: int | None, rows: Iterator[TraceRow], info: TraceInfo
) -> Iterator[TraceRow]:
    total = max(min(info.num_rows, limit or info.num_rows), 1)
    for number, row in enumerate(rows):
        if number % 64 == 0:
            line.show(number / total, f"simulated {number:,} of {total:,} requests")
        yield row


def _policy_name(policy: Any) -> str | None:
    """Returns the name under which a policy stands in the configuration and the figures, or None if
    no policy is given."""
    if policy is None or isinstance(policy, str):
        return policy
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}:{re.sub(r'[^a-zA-Z0-9_]+', '_', named.__qualname__)}"


def report(
    runs: Sequence[SimulationResult | str | Path | Mapping[str, Any]],
    path: str | Path,
    names: Sequence[str] | None = None,
) -> None:
    """Writes a page with several runs beside each other, like `moonpool report`.

    A run is a result, its `summary`, or a file of `simulate --json` or `replay --json`. `names`
    are the headings; without them, a run is named after its file or its place. Raises ValueError
    and OSError.
    """
    from moonpool.studies.side_by_side import NamedRun, read_run, runs_page

    given = list(names) if names is not None else [_run_name(r, n) for n, r in enumerate(runs, 1)]
    if len(given) != len(runs):
        raise ValueError(f"there are {len(given)} names for {len(runs)} runs: give one for each")
    named = []
    for name, run in zip(given, runs, strict=True):
        if isinstance(run, SimulationResult):
            named.append(NamedRun(name, run.summary))
        elif isinstance(run, Mapping):
            named.append(NamedRun(name, run))
        else:
            named.append(NamedRun(name, read_run(run)))
    Path(path).write_text(runs_page(named), encoding="utf-8")


def _run_name(run: Any, number: int) -> str:
    return Path(run).stem if isinstance(run, str | Path) else f"run {number}"
