"""Makes docs/reliability.md from benchmarks/results/faults.json and kills.json."""

from __future__ import annotations

import json
from collections import Counter
from statistics import quantiles
from typing import Any

from benchmarks.checkout import ROOT

KILLS = ROOT / "benchmarks" / "results" / "kills.json"
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

This page is generated: `moonpool bench faults` injects each fault into a server of real processes
under running streams, and writes this page and
[faults.json](../benchmarks/results/faults.json). "Right" answers equal those of the undisturbed
server, token for token. Recovery is the time from the fault until a new request is answered right;
times depend on the machine and on what else it does.

"""
CAMPAIGN = """
## Any process, at any moment

`moonpool bench kills` kills (`kill -9`) and stops (SIGSTOP) every kind of process but the
supervisor at random moments, under streams that run all the time. Each answer is compared with that
of the undisturbed server, bit for bit. A pause is the longest time between two tokens of a stream
that ran when the fault came, up to the next fault.

"""
TAIL = """
## What this does not cover

Faults that a public server cannot be given, such as lost links, damaged transfers and clock pauses,
are covered by the seeded swarm (`tests/sim`), the soak (`tests/soak`) and the contract tests of
transfers. [SECURITY.md](../SECURITY.md) has the threats and their tests.
"""
OUTCOMES = ("right", "wrong", "cut", "refused", "hung")


def page(found: dict[str, Any], kills: dict[str, Any]) -> str:
    """The table of single faults, and those of the campaign."""
    lines = ["| fault | times | promised | seen | P50 | P99 of recovery |", "|" + " --- |" * 6]
    for row in found["faults"]:
        seen = ", ".join(f"{row['seen'][o]} {o}" for o in OUTCOMES if row["seen"].get(o))
        lost = row["not_recovered"]
        seen += f"; {lost} times no recovery within 60 s" if lost else ""
        p50, p99 = (f"{v:.2f} s" if v is not None else "-" for v in (row["p50_s"], row["p99_s"]))
        lines.append(
            f"| {row['fault']} | {row['times']} | {row['promised']} | {seen} | {p50} | {p99} |"
        )
    single = HEAD + "\n".join(lines) + "\n" + _measured(found)
    return single + CAMPAIGN + _campaign(kills) + _measured(kills) + TAIL


def _measured(found: dict[str, Any]) -> str:
    origin = found["origin"]
    return f"\nMeasured by `{origin['command']}` at {origin['commit']} on {origin['machine']}.\n"


def _campaign(kills: dict[str, Any]) -> str:
    lines = ["| processes | faults | answers | longest pause without a fault |", "|" + " --- |" * 4]
    pauses: dict[tuple[str, str, bool], list[float]] = {}
    times: Counter[tuple[str, str, bool]] = Counter()
    for one in kills["arrangements"]:
        seen = ", ".join(f"{one['answers'][o]:,} {o}" for o in ("right", "wrong", "refused", "cut"))
        calm = one["undisturbed_pause_s"].get("max")
        quiet = "-" if calm is None else f"{calm:.2f} s"
        lines.append(f"| {one['arrangement']} | {one['faults']} | {seen} | {quiet} |")
        for row in one["rows"]:
            key = (row["kind"], row["signal"], row["had_twin"])
            pauses.setdefault(key, []).extend(row["pauses_s"])
            times[key] += row["times"]
    lines += ["", "| process | signal | times | P50 | P99 | longest pause |", "|" + " --- |" * 6]
    for key in sorted(pauses):
        kind, signal, had_twin = key
        name = f"{kind}, one of two" if had_twin else kind
        p50, p99, longest = _quantiles(pauses[key])
        lines.append(f"| {name} | {signal} | {times[key]} | {p50} | {p99} | {longest} |")
    return "\n".join(lines) + "\n"


def _quantiles(pauses: list[float]) -> tuple[str, str, str]:
    if not pauses:
        return ("-",) * 3
    cuts = quantiles(pauses, n=100, method="inclusive") if len(pauses) > 1 else pauses * 99
    return f"{cuts[49]:.2f} s", f"{cuts[98]:.2f} s", f"{max(pauses):.2f} s"


def current() -> str:
    """The page that the committed results give."""
    return page(json.loads(RESULTS.read_text()), json.loads(KILLS.read_text()))
