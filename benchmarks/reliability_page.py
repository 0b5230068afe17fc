"""Makes docs/reliability.md from benchmarks/results/faults.json, for `moonpool bench faults`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.checkout import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

This page is generated: `moonpool bench faults` injects each fault into a server of real processes
under running streams, and writes this page and
[faults.json](../benchmarks/results/faults.json). "Right" answers equal those of the undisturbed
server, token for token. Recovery is the time from the fault until a new request is answered right;
times depend on the machine and on what else it does.

"""
TAIL = """
Faults that a public server cannot be given, such as lost links, damaged transfers and clock pauses,
are covered by the seeded swarm (`tests/sim`), the soak (`tests/soak`) and the contract tests of
transfers. [SECURITY.md](../SECURITY.md) has the threats and their tests.
"""
OUTCOMES = ("right", "wrong", "cut", "refused", "hung")


def page(found: dict[str, Any]) -> str:
    lines = ["| fault | times | promised | seen | P50 | P99 of recovery |", "|" + " --- |" * 6]
    for row in found["faults"]:
        seen = ", ".join(f"{row['seen'][o]} {o}" for o in OUTCOMES if row["seen"].get(o))
        lost = row["not_recovered"]
        seen += f"; {lost} times no recovery within 60 s" if lost else ""
        p50, p99 = (f"{v:.2f} s" if v is not None else "-" for v in (row["p50_s"], row["p99_s"]))
        lines.append(
            f"| {row['fault']} | {row['times']} | {row['promised']} | {seen} | {p50} | {p99} |"
        )
    origin = found["origin"]
    where = f"\nMeasured by `{origin['command']}` at {origin['commit']} on {origin['machine']}.\n"
    return HEAD + "\n".join(lines) + "\n" + where + TAIL


def current() -> str:
    """The page that the committed results give."""
    return page(json.loads(RESULTS.read_text()))
