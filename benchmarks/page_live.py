"""Rows of docs/benchmarks.md on admission, decisions, arrangements and conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONVERSATION_HEADER = (
    *("model, sessions, load", "arrangement", "within both SLOs", "rejected", "prefix hits"),
    *("TTFT P50, P90", "TBT P50, P90", "said beforehand"),
)


def overload_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of effective requests of each admission policy, live and simulated."""
    for found in results:
        model = found["cluster"]["model"].removeprefix("random:")
        loads = sorted({load for runs in found["runs"].values() for load in runs}, key=float)
        for load in loads:
            row = [f"{model}, {load} x capacity"]
            for policy in ("none", "baseline", "early", "predictive", "goodput"):
                run = found["runs"].get(policy, {}).get(load)
                row.append(
                    f"{run['live']['effective']} ({run['simulated']['effective']})" if run else "-"
                )
            yield tuple(row)


def start_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields one row of the start of `serve` for each way of starting."""
    for name, start in (("first, empty cache", found["first"]), ("again, median", found["again"])):
        memory = start["memory_bytes"]
        yield (
            name,
            *(f"{start[key]:.1f} s" for key in ("ready_s", "first_token_s", "cpu_s")),
            f"{memory['sum'] / 1e9:.2f} GB ({memory['kvcache'] / 1e9:.2f} GB)",
        )


_ADMISSIONS = ("none", "baseline", "early", "predictive", "goodput")
_NO_WAIT = " (no wait)"


def admission_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of simulated effective requests of each admission policy, on equal terms."""
    for row in found["rows"]:
        effective, bound, best = row["effective"], row["bound"], row["best_schedule"]
        goodput = effective["goodput"]
        yield (
            f"{row['workload']}, {row['speed']:g} x",
            f"{bound:,} of {row['requests']:,}",
            f"{best:,}",
            *_with_and_without_wait(effective),
            f"{goodput / max(bound, 1):.0%}, {goodput / max(best, 1):.0%}",
        )


def admission_workload_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of simulated effective requests of each admission policy, and their sums."""
    for row in found["rows"]:
        slos = f"{row['slo_ttft_s']:g} s, {row['slo_tbt_s']:g} s"
        yield (
            f"{row['workload']}, {row['cluster']}, {slos}, {row['arrivals']}, {row['load']:g}",
            *_with_and_without_wait(row["effective"]),
        )
    yield ("sum", *_with_and_without_wait(found["summary"]["sum"]))


def _with_and_without_wait(effective: dict[str, int]) -> Iterator[str]:
    """Figures of all policies with the wait for a decode batch, and in brackets without it."""
    for name in _ADMISSIONS:
        yield f"{effective[name]:,} ({effective[name + _NO_WAIT]:,})"


def colocated_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the goodput of 1P+1D and of two mixed instances, live and simulated."""
    for length in found["lengths"]:
        for point in length["points"]:
            live, simulated = point["live"]["goodput_rps"], point["simulated"]["goodput_rps"]
            yield (
                f"prompts of {length['prompt_tokens']:,}, {point['load']} x capacity",
                *(f"{live[name]:.1f} ({simulated[name]:.1f})" for name in ("1P+1D", "2M")),
            )


def conductor_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the time of one decision by number of instances, with the policies that decided."""
    policies = f"{found['placement']}, {found['admission']}"
    for key, row in found.items():
        if key.startswith("instances_"):
            times = (row[name]["median"] for name in ("decision_us", "ending_us", "token_us"))
            decision, *others = (f"{each:.0f} us" for each in times)
            p99 = f"{row['decision_us']['p99']:.0f} us"
            yield (f"{int(key.split('_')[1]):,}", policies, decision, p99, *others)


def conversation_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields one row of each run, with the best of its load in bold."""
    rows = sorted(found["rows"], key=lambda row: (*_place(row), row["load"]))
    best: dict[tuple[Any, ...], int] = {}
    for row in rows:
        best[_point(row)] = max(best.get(_point(row), 0), row["effective"])
    for row in rows:
        basis = found["bases"].get(f"{row['model']}/{row['workload']}", {})
        share = f"{row['effective']:,} of {row['requests']:,}"
        client = "" if row["client"] == "moonpool" else f", sent by {row['client']}"
        yield (
            f"{row['model']}, {row['workload']}, {row['load']:g} x{client}",
            row["system"],
            f"**{share}**" if row["effective"] == best[_point(row)] else share,
            str(row["rejected"]),
            "-" if row["hit_ratio"] is None else f"{row['hit_ratio']:.0%}",
            _both(row["ttft_s"]),
            _both(row["tbt_s"]),
            _said(row, basis),
        )


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["workload"], row["client"]


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    return *_place(row), row["load"]


def _both(seconds: dict[str, float]) -> str:
    return f"{1e3 * seconds['p50']:,.0f}, {1e3 * seconds['p90']:,.0f} ms"


def _said(row: dict[str, Any], basis: dict[str, Any]) -> str:
    """Says whether the planner named the cluster, and what the cluster's simulation served."""
    words = ["planned"] if row["system"] == basis.get("planned") else []
    simulated = basis.get("simulated", {}).get(f"{row['load']:g}", {}).get(row["system"])
    if simulated:
        words.append(f"{simulated['effective']:,} of {simulated['requests']:,}")
    return ", ".join(words) or "-"


def plan_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of named clusters beside an exhaustive search of cheaper ones."""
    for name, row in found["workloads"].items():
        one = row["named"]
        if one is None:
            yield (name, "none", *("-",) * 7)
            continue
        low, high = one["another_sample"]
        searched = row["searched"]
        yield (
            name,
            f"{one['cluster']} of {one['hardware']}",
            f"{one['usd_per_h']:.2f}",
            f"{one['share']:.1%} ({low:.0%} to {high:.0%})",
            f"{row['fresh_within']} of {len(row['fresh'])}",
            f"{row['plan_runs']:.0f}, {row['plan_cpu_s']:.0f} s",
            f"{searched['candidates']:,} ({searched['simulated']:,})",
            f"{row['audited_kept']} of {row['audited']}",
            "none" if row["right"] else f"{row['over_best']:.1%}",
        )


def front_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of rates and CPU time by the front before the servers."""
    for name, row in found.items():
        if name not in ("asked", "on_paper", "origin"):
            yield (
                name,
                f"{row['tokens_per_s']:,.0f}",
                f"{row['requests_per_s']:,.0f}",
                f"{row['ttft_p50_ms']:.1f} ms",
                _costs(row["cpu_us_per_token"], "us"),
                _costs(row["cpu_ms_per_request"], "ms"),
            )
    for name, row in found["on_paper"].items():
        tokens, requests = f"{row['tokens_per_s']:,.0f}", f"{row['requests_per_s']:,.0f}"
        yield (f"on paper, {name}", tokens, requests, "-", "-", "-")


def _costs(found: dict[str, float], unit: str) -> str:
    costs = [f"{kind} {cost:.2f} {unit}" for kind, cost in found.items() if cost >= 0.005]
    return ", ".join(costs) or "-"


def simulator_peer_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of CPU time and memory of two simulators by the size of the cluster."""
    for row in found["rows"]:
        prefill, decode, speed = row["size"]
        for name in ("moonpool", "dynamo"):
            one = row[name]
            yield (
                f"{prefill} + {decode}, {speed:g} x, {row['requests']:,} requests",
                name,
                f"{one['cpu_s']:.1f} s",
                f"{one['ms']:.2f} ms",
                f"{one['peak_mb']:,.0f} MB",
            )


_FRONT_TEXT = (
    "Streams and short calls before servers that compute nothing: straight to one server, through"
    " moonpool with one process and with fronts, through vllm-router. Load and servers share the"
    " two threads, so rates are not limits. On paper, each front and the Conductor have a core."
)
FRONT_SECTION = (
    "Fronts",
    _FRONT_TEXT,
    ("front-scale",),
    ("", "tokens/s", "requests/s", "TTFT P50", "CPU a token", "CPU a request"),
    front_rows,
)
_SIMULATOR_TEXT = (
    "The conversation trace on prefill + decode instances with KV-aware placement, whole processes."
    " Their models of time differ, so only the cost of simulating is compared."
)
SIMULATOR_PEER_SECTION = (
    "The simulator beside Dynamo's",
    _SIMULATOR_TEXT,
    ("simulator-peer",),
    ("instances, speed", "simulator", "CPU time", "a request", "peak memory"),
    simulator_peer_rows,
)
