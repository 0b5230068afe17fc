"""Makes the forecasts that are published before a run: `moonpool plan` on the sessions as a trace,
and a simulation of each arrangement, both with the profile of a live cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.suite.conversations.sessions import TRACE_BLOCK_TOKENS
from moonpool.trace.row import TraceRow
from moonpool.types import Slo
from moonpool_lab.profiling.live_cluster import LiveCluster, simulate_rows
from moonpool_lab.profiling.live_profile import LiveProfile

PLAN_S = 45.0
PLAN_RUNS = 80
DEVICE = "A800-SXM:8"
"""A name for the node that was profiled; its price is the same for all arrangements."""


class _Line(msgspec.Struct):
    """A row of Bailian's format, whose blocks have 16 tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    chat_id: str


def write_session_trace(rows: Sequence[TraceRow], path: Path) -> None:
    """Writes the rows in Bailian's format. Raises OSError."""
    lines = (
        _Line(row.arrived_s, row.input_tokens, row.output_tokens, row.hash_ids, row.session)
        for row in rows
    )
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def plan_for(
    rows: Sequence[TraceRow], profile: LiveProfile, slo: Slo, cluster: LiveCluster
) -> dict[str, Any]:
    """Returns the cluster that `moonpool plan` names, or the reason why it names none."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        trace, costs, out = place / "trace.jsonl", place / "profile.json", place / "plan.json"
        write_session_trace(rows, trace)
        costs.write_bytes(msgspec.json.encode(profile.cost))
        options = {
            "--trace": trace,
            "--cost": costs,
            "--devices": DEVICE,
            "--slo-ttft": slo.ttft_s,
            "--slo-tbt": slo.tbt_s,
            "--block-size": cluster.block_tokens,
            "--time-limit": PLAN_S,
            "--runs": PLAN_RUNS,
            "--processes": 1,
            "--json": out,
        }
        words = [str(word) for pair in options.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "moonpool", "plan", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            return {"named": "", "why": done.stderr.decode(errors="replace").strip()[-300:]}
        found = msgspec.json.decode(out.read_bytes())
    choice = found.get("choice") or {}
    return {"named": choice.get("cluster", ""), "why": found.get("advice", "")}


def simulate_arrangements(
    clusters: Sequence[LiveCluster], rows: Sequence[TraceRow], profile: LiveProfile
) -> dict[str, dict[str, Any]]:
    """Returns the requests, the effective requests and the hits of each arrangement, by its
    name."""
    found = {}
    for cluster in clusters:
        figures, _ = simulate_rows(cluster, profile, rows, TRACE_BLOCK_TOKENS)
        found[cluster.words] = {
            "requests": figures["requests"],
            "effective": figures["effective"],
            "hit_ratio": figures["cache"]["hit_ratio"],
        }
    return found
