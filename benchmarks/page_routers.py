"""Writes the tables of the guide to routers from the results of `moonpool bench routers`.

`python -m benchmarks.page_routers` writes the tables between the page's two marks; the rest of the
page is written by hand. `--check` writes nothing, and ends with status 1 if the tables differ from
the result. Without a result the page says that nothing is measured yet.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.cli.page_section import PageSection
from benchmarks.markdown import measured_by, plain, table

FOLDER = ROOT / "benchmarks" / "results"
RESULTS = tuple(FOLDER / f"routers{of}.json" for of in ("", "-agents", "-mixed", "-vllm"))
PAGE = ROOT / "docs" / "routers.md"
SECTION = PageSection(
    "<!-- bench routers: begin -->",
    "<!-- bench routers: end -->",
    "python -m benchmarks.page_routers",
)
UNMEASURED = "Not measured yet.\n"
WORDS = {
    "round-robin": "round robin, by the client",
    "vllm-round-robin": "vllm-router, `round_robin`",
    "vllm-cache-aware": "vllm-router, `cache_aware`",
    "vllm-kv-aware": "vllm-router, `kv_aware`",
    "vllm-programs": "vllm-router, programs",
    "ray-two-choices": "Ray Serve, two choices",
    "ray-prefix-aware": "Ray Serve, prefix-aware",
    "ray-conductor": "Ray Serve, moonpool's Conductor",
    "moonpool-none": "moonpool, `--admission none`",
    "moonpool-assumed": "moonpool, caches assumed",
    "moonpool": "moonpool",
}
HEADER = (
    *("load", "router", "within both SLOs, a second", "of what was asked", "refused", "failed"),
    *("TTFT P50, P99", "TBT P50, P99", "hits", "CPU a request"),
)
PROGRAM_HEADER = ("makespan P50, P90", "programs finished", "calls refused")
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for an interval of 95 %, by degrees of freedom from 1 on."""
T_95_MANY = 2.0


def routers_section(found: dict[str, Any]) -> str:
    """Returns one table for each workload, with the origin of its figures."""
    parts = []
    for name, basis in found["bases"].items():
        rows = [row for row in found["rows"] if row["workload"] == name]
        if rows:
            parts.append(_workload(name, basis, rows))
    fleet = found["fleet"]
    what = "vLLMs" if fleet["vllm_python"] else "stubs with a model of time"
    speeds = ", ".join(f"{speed:g}" for speed in fleet["speeds"])
    parts.append(
        f"Behind each: {len(fleet['speeds'])} {what} (how slow each is: {speeds}), with"
        f" {fleet['kv_tokens']:,} tokens of KVCache and steps of at most"
        f" {fleet['step_tokens']} tokens. {measured_by(found)}.\n"
    )
    return "\n".join(parts)


def _workload(name: str, basis: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    slo = basis["slo"]
    return (
        f"**{name.capitalize()}**: SLOs TTFT {slo['ttft_s']:.2f} s and TBT"
        f" {1e3 * slo['tbt_s']:.0f} ms; load 1 is {basis['requests_per_s']:.3g} requests a"
        f" second.\n\n{table(_header(rows), router_rows(rows))}"
    )


def _header(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return HEADER + (PROGRAM_HEADER if any("programs" in row for row in rows) else ())


def router_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each load and router, the best of its load in bold; the row of a router that does
    not run says why."""
    for load in sorted({row["load"] for row in rows}):
        own = {
            name: [row for row in rows if row["load"] == load and row["router"] == name]
            for name in WORDS
        }
        ran = {
            name: [row for row in each if "absent" not in row] for name, each in own.items() if each
        }
        means = {name: _mean(each, "goodput_rps") for name, each in ran.items() if each}
        best = max(means.values(), default=0.0)
        for name, each in ran.items():
            if not each:
                why = f"does not run: {plain(own[name][0]['absent'])}"
                yield (f"{load:g}", WORDS[name], why, *("-",) * (len(_header(rows)) - 3))
                continue
            shown = _interval([row["goodput_rps"] for row in each])
            yield (
                f"{load:g}",
                WORDS[name],
                f"**{shown}**" if means[name] == best else shown,
                f"{_mean_of(each, _share):.0%}",
                f"{_mean_of(each, lambda row: row['rejected'] / max(row['requests'], 1)):.0%}",
                f"{_mean_of(each, lambda row: row['failed'] / max(row['requests'], 1)):.0%}",
                _tails([row["ttft_s"] for row in each]),
                _tails([row["tbt_s"] for row in each]),
                f"{_mean(each, 'engine_hit_ratio'):.0%}",
                f"{_mean(each, 'cpu_ms_per_request'):.1f} ms" if _has_process(name) else "-",
                *(_of_programs(each) if len(_header(rows)) > len(HEADER) else ()),
            )


def _has_process(name: str) -> bool:
    return name != "round-robin"


def _share(row: dict[str, Any]) -> float:
    return float(row["effective"] / max(row["requests"], 1))


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(float(row[key]) for row in rows)


def _mean_of(rows: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.fmean(map(of, rows))


def _interval(values: Sequence[float]) -> str:
    """Returns the mean over the rounds, and half of its 95 % interval."""
    mean = statistics.fmean(values)
    degrees = len(values) - 1
    if not degrees:
        return f"{mean:.2f}"
    t = T_95[degrees - 1] if degrees <= len(T_95) else T_95_MANY
    return f"{mean:.2f} ± {t * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def _of_programs(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the medians of makespans over the programs of all rounds, where None means that a
    program never ended."""
    each = [row["programs"] for row in rows if "programs" in row]
    if not each:
        return ("-",) * len(PROGRAM_HEADER)
    shown = []
    for key in ("p50", "p90"):
        all_s = (found["makespan_s"][key] for found in each)
        median_s = statistics.median(inf if one is None else one for one in all_s)
        shown.append(f"{median_s:.1f} s" if isfinite(median_s) else "never")
    finished, begun, refusals = (
        sum(found[key] for found in each) for key in ("finished", "begun", "refusals")
    )
    return ", ".join(shown), f"{finished} of {begun}", str(refusals)


def _tails(each: Sequence[dict[str, float]]) -> str:
    shown = (1e3 * statistics.median(one[key] for one in each) for key in ("p50", "p99"))
    return ", ".join(f"{value:,.0f}" for value in shown) + " ms"


def main(page: Path = PAGE, results: Sequence[Path] = RESULTS) -> int:
    """Writes the tables of each result that exists, or checks them; returns the exit status."""

    def section() -> str:
        texts = [result.read_text() for result in results if result.exists()]
        return "\n".join(routers_section(json.loads(text)) for text in texts) or UNMEASURED

    return SECTION.main(page, section)


if __name__ == "__main__":
    sys.exit(main())
