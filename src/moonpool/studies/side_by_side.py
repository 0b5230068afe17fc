"""Writes a page with several runs beside each other, from the figures in their JSON files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moonpool.pages.chart import bars
from moonpool.pages.units import counted, duration, joined, percent, significant
from moonpool.sim.report.page import CONFIG_TABLES, environment
from moonpool.sim.report.plots import ReportFigure, Table
from moonpool.studies.run_inputs import different_inputs

MAX_RUNS = 12
"""The most runs on a page, because more columns do not fit."""
COLOURS = ("c1", "c2", "c3", "c4", "c5")
_NO_VALUE = "–"
ROWS = (
    ("requests", ("requests",), "count"),
    ("within both SLOs", ("effective_share",), "share"),
    ("within SLOs, per second", ("goodput_rps",), "number"),
    ("refused", ("rejected",), "count"),
    ("failed", ("failed",), "count"),
    ("TTFT, median", ("ttft_s", "p50"), "time"),
    ("TTFT, 90 %", ("ttft_s", "p90"), "time"),
    ("TTFT, 99 %", ("ttft_s", "p99"), "time"),
    ("TBT, median", ("tbt_s", "p50"), "time"),
    ("TBT, 99 %", ("tbt_s", "p99"), "time"),
    ("prompt tokens from the cache", ("cache", "hit_ratio"), "share"),
    ("prefill compute per request", ("prefill_compute_s", "mean"), "time"),
    ("wasted prefill", ("wasted_prefill_s",), "time"),
    ("prefill instances busy", ("utilisation", "prefill"), "share"),
    ("decode instances busy", ("utilisation", "decode"), "share"),
    ("mixed instances busy", ("utilisation", "mixed"), "share"),
    ("price in USD", ("usd",), "number"),
)
"""The rows of the page: name, place in the figures, and unit. A row that no run has is left out."""
CHARTS = (
    ("Requests within both SLOs", "Share of all requests; refused and failed ones are not.", 1),
    ("Time to first token, 90 %", "Nine of ten answers began sooner.", 6),
    ("Time between tokens, 99 %", "Of all gaps between two tokens of an answer.", 9),
    ("Prompt tokens from the cache", "Share that no instance had to compute.", 10),
)
"""The charts of the page: title, explanation, and row."""


class NamedRun(NamedTuple):
    name: str
    figures: Mapping[str, Any]


def read_run(path: str | Path) -> dict[str, Any]:
    """Reads a file of `simulate --json` or `replay --json`. Raises ValueError."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the figures {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not {"requests", "ttft_s", "cache"} <= found.keys():
        raise ValueError(f"{path} has no figures of a run: write them with `simulate --json FILE`")
    return found


def runs_page(runs: Sequence[NamedRun]) -> str:
    """Returns the page, which compares each run with the first run. Raises ValueError."""
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"there are {len(runs)} runs: a page holds 1 to {MAX_RUNS}")
    names = [run.name for run in runs]
    return (
        environment()
        .get_template("runs.html.jinja")
        .render(
            lead=_lead(runs),
            warnings=[
                f"{other.name} did not run on the same inputs as {names[0]}: {'; '.join(found)}."
                for other in runs[1:]
                if (found := different_inputs(runs[0].figures, other.figures))
            ],
            charts=[_chart(runs, *chart) for chart in CHARTS],
            table=Table(("", *names), list(_rows(runs))),
            stages=_named_values(runs, "stages_s"),
            refusals=_named_values(runs, "rejected_by_reason"),
            settings=_settings(runs),
        )
    )


def _lead(runs: Sequence[NamedRun]) -> str:
    best = max(runs, key=lambda run: run.figures["effective_share"])
    share = percent(best.figures["effective_share"])
    if len(runs) == 1:
        return f"{share} of the requests of {best.name} were served within both SLOs."
    same = [
        run.name
        for run in runs
        if run.figures["effective_share"] == best.figures["effective_share"]
    ]
    who = joined(same) if len(same) < len(runs) else "all of them"
    return (
        f"{counted(len(runs), 'run')} side by side. Most requests were served within both SLOs by "
        f"{who}: {share}."
    )


def _value(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = figures
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return _NO_VALUE
    if unit == "share":
        return percent(value)
    if unit == "time":
        return duration(value)
    return f"{value:,.0f}" if unit == "count" else significant(value)


def _rows(runs: Sequence[NamedRun]) -> Iterator[tuple[str, ...]]:
    for name, path, unit in ROWS:
        values = [_value(run.figures, path) for run in runs]
        if any(value is not None for value in values):
            texts = [_shown(value, unit) for value in values]
            changes = ["", *(_change(values[0], value) for value in values[1:])]
            yield (name, *(f"{t}{c}" for t, c in zip(texts, changes, strict=True)))


def _change(first: float | None, value: float | None) -> str:
    """Returns how far a value is from the first run's value, if that is meaningful."""
    if not first or value is None or value == first:
        return ""
    return f" ({value / first - 1:+.0%})" if abs(value / first - 1) < 10 else ""


def _chart(runs: Sequence[NamedRun], title: str, how: str, row: int) -> ReportFigure:
    _, path, unit = ROWS[row]
    values = [_value(run.figures, path) for run in runs]
    drawn = bars(
        [
            (run.name[:22], value or 0.0, _shown(value, unit), COLOURS[number % len(COLOURS)])
            for number, (run, value) in enumerate(zip(runs, values, strict=True))
        ],
        title,
    )
    return ReportFigure(title, how, drawn)


def _named_values(runs: Sequence[NamedRun], part: str) -> Table | None:
    """Returns a table of the named values in one part of the figures, or None if there are none."""
    names = dict.fromkeys(name for run in runs for name in run.figures.get(part) or {})
    if not names:
        return None
    unit = "time" if part.endswith("_s") else "count"
    rows = [
        (name.replace("_", " "), *(_shown(_value(run.figures, (part, name)), unit) for run in runs))
        for name in names
    ]
    return Table(("", *(run.name for run in runs)), rows)


def _settings(runs: Sequence[NamedRun]) -> Table | None:
    """Returns the settings in which the runs differ, or None if there are none."""
    rows = []
    tables = [_flat(run.figures) for run in runs]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, _NO_VALUE) for table in tables]
        if len(set(values)) > 1:
            rows.append((name, *values))
    return Table(("", *(run.name for run in runs)), rows) if rows else None


def _flat(figures: Mapping[str, Any]) -> dict[str, str]:
    config = figures.get("config") or {}
    found = {
        f"{table}.{key}": str(value)
        for table in CONFIG_TABLES
        for key, value in (config.get(table) or {}).items()
    }
    run = {name: str(value) for name, value in (figures.get("run") or {}).items()}
    return found | run | {"seed": str(figures.get("seed", _NO_VALUE))}
