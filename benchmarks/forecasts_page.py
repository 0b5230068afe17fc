"""Writes docs/forecasts.md from benchmarks/results/forecasts.jsonl: `python -m
benchmarks.forecasts_page`.

`moonpool forecast --table benchmarks/results/forecasts.jsonl` adds to that file and never changes
existing lines; a broken chain of hashes ends this command with an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.markdown import seconds, table
from moonpool_lab.forecast.forecast_table import Entry, read_table
from moonpool_lab.forecast.measured_server import MOST_DRIFT

TABLE = ROOT / "benchmarks" / "results" / "forecasts.jsonl"
PAGE = ROOT / "docs" / "forecasts.md"
HEAD = """# Forecasts

This page is generated: `python -m benchmarks.forecasts_page` writes it from
[forecasts.jsonl](../benchmarks/results/forecasts.jsonl). `moonpool forecast URL --trace FILE`
measures a running server through its front door for a minute, fits a profile, and lets the
[simulator](simulation.md) say what the server will do at shares of the capacity that it predicts.
That stands in the table before the first request of a load is sent. Then the loads are tried, and
what came is added. Each entry holds the hash of the one before, so no later run changes one.

```sh
moonpool forecast http://127.0.0.1:8000 --trace trace.jsonl --scale-tokens 1/16
```

The aim is a median error of 3 %, and at most 10 % at the worst P99, for workloads that nobody
tuned to. Errors are forecast over measured, less 1; of hits and of effective requests they are
differences. Rows that miss the aim stay. The method is that of the commit that each row names, so
later rows may be better. Where both sides have at most a few requests, a P99 is
one of them. Forecasts suppose that the machine does nothing else; the row of
random:m30 was made on two cores with a dozen other programs, so it shows the command, not the
model.

"""
FIGURES = (
    *(("ttft_s.p50", "TTFT P50"), ("ttft_s.p90", "P90"), ("ttft_s.p99", "P99")),
    *(("tbt_s.p50", "TBT P50"), ("tbt_s.p90", "P90"), ("tbt_s.p99", "P99")),
)
P99 = ("ttft_s.p99", "tbt_s.p99")


def page(entries: Iterable[Entry]) -> str:
    forecasts = [entry for entry in entries if entry["kind"] == "forecast"]
    outcomes: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["kind"] == "outcome":
            outcomes[entry["forecast"]].append(entry)
    every = [one for each in outcomes.values() for one in each]
    lines = [HEAD + summary(every) + _overview(forecasts, outcomes)]
    for forecast in forecasts:
        lines.append(_section(forecast, outcomes[forecast["hash"]]))
    return "\n".join(lines)


def summary(outcomes: list[Entry]) -> str:
    """Returns one line about all outcomes."""
    errors, within = _errors(outcomes, dict(FIGURES)), _errors(outcomes, ("effective_share",))
    worst = [abs(one["errors"].get(name, 0.0)) for one in outcomes for name in P99]
    if not errors:
        return "No forecast has been tried yet.\n"
    return (
        f"{len(outcomes)} loads tried: median error of latencies {median(errors):.1%}, worst of a"
        f" P99 {max(worst):.0%}; median error of effective requests {median(within):.1%}.\n"
    )


def _errors(outcomes: Iterable[Entry], names: Container[str]) -> list[float]:
    return [abs(e) for one in outcomes for n, e in one["errors"].items() if n in names]


def _overview(forecasts: Iterable[Entry], outcomes: Mapping[str, list[Entry]]) -> str:
    """Returns a table with a row for each forecast, the newest first."""
    rows = []
    for forecast in reversed(list(forecasts)):
        tried = outcomes.get(forecast["hash"], [])
        errors = _errors(tried, dict(FIGURES))
        within = " ".join(f"{one['errors']['effective_share']:+.1%}" for one in tried)
        typical = f"{median(errors):.0%}" if errors else "not tried"
        rows.append((forecast["title"], forecast["written"][:10], typical, within))
    header = ("workload", "written", "median error of latencies", "error of effective requests")
    return "\n" + table(header, rows) if rows else ""


def _section(forecast: Entry, outcomes: list[Entry]) -> str:
    slo, trace, origin = forecast["slo"], forecast["trace"], forecast["origin"]
    by_load = {outcome["load"]: outcome for outcome in outcomes}
    rows = [row for each in forecast["loads"] for row in _rows(each, by_load.get(each["load"]))]
    header = ("load", "", *(name for _, name in FIGURES), "hits", "effective")
    return (
        f"## {forecast['title']}\n\nWritten {forecast['written']}, hash"
        f" `{forecast['hash'][:16]}`. Trace {trace['trace']} ({trace['trace_sha256']}),"
        f" {trace['scale_tokens']} of its tokens. Predicted capacity"
        f" {forecast['capacity_rps']:.3g} requests a second within TTFT {slo['ttft_s']:.3g} s and"
        f" TBT {slo['tbt_s']:.3g} s.{_drift(forecast)}\n\n{table(header, rows)}\n"
        f"By `{origin['command']}`, moonpool {origin['version']}, {origin['commit']}, on"
        f" {origin['machine']}.\n"
    )


def _drift(forecast: Entry) -> str:
    drift = forecast["measured"].get("drift", 1.0)
    if 1 / MOST_DRIFT <= drift <= MOST_DRIFT:
        return ""
    return f" **Not steady**: a prompt took {drift:.2g} times as long when its measurement ended."


def _rows(load: dict[str, Any], outcome: Entry | None) -> Iterator[tuple[str, ...]]:
    yield f"{load['load']:g}", "forecast", *_cells(load["figures"])
    if outcome is None:
        yield "", "not tried", *("",) * (len(FIGURES) + 2)
        return
    yield "", "measured", *_cells(outcome["figures"])
    errors = outcome["errors"]
    cells = [f"{errors[name]:+.0%}" if name in errors else "-" for name, _ in FIGURES]
    cells += [f"{errors[name]:+.1%}" for name in ("hit_ratio", "effective_share")]
    yield "", "error", *cells


def _cells(figures: dict[str, Any]) -> Iterator[str]:
    for name, _ in FIGURES:
        latency, _, share = name.partition(".")
        yield seconds(figures[latency][share])
    yield f"{figures['hit_ratio']:.1%}"
    yield f"{figures['effective']:,} of {figures['requests']:,}"


def current(path: Path = TABLE) -> str:
    """Returns the page with the table. Raises TableError."""
    return page(read_table(path) if path.exists() else [])


if __name__ == "__main__":
    PAGE.write_text(current())
