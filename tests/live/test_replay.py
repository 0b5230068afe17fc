"""Replays a trace to a real cluster and simulates the same trace: both have the same names and
hits, and the server's figures agree with the client's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace
from tests.forked.commands import LocalServer, run_command

TRACE = ["--scale-tokens", "1/32", "--requests", "40"]


def run(command: str, folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / f"{command}.json"
    trace = ["--trace", str(folder / "t.jsonl"), *TRACE, "--json", str(out)]
    run_command(command, *trace, *arguments, timeout_s=120).check_returncode()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.long
def test_the_same_trace_live_and_simulated(cluster: LocalServer, tmp_path: Path) -> None:
    rows = generate(BUILT_IN["conversation"], num_requests=40, seed=2)
    write_trace(rows, tmp_path / "t.jsonl")
    live = run("replay", tmp_path, "--url", cluster.url, "--speed", "8")
    simulated = run(
        "simulate", tmp_path, *("--prefill", "2", "--decode", "2", "--block-size", "16")
    )
    assert live["completed"] == simulated["completed"] == 40, live["errors"]
    assert live["output_tokens"] == simulated["output_tokens"]
    assert live["cache"]["input_tokens"] == simulated["cache"]["input_tokens"]
    assert live["cache"]["hit_tokens"] > 0
    missing = set(simulated) - set(live)
    only_simulated = {"bubbles", "kvcache_occupation_byte_s", "preemptions", "events"}
    only_simulated |= {"cost_domain", "scaling", "instance_hours", "usd", "trace_has_hashes"}
    # These figures are in /cluster, /metrics and /beliefs.
    of_the_head = {"ssd", "roles", "drains", "predictions", "learned"}
    assert missing <= only_simulated | of_the_head
    assert set(simulated["utilisation"]) == set(live["utilisation"])
    assert {"bytes", "seconds"} <= set(live["transfer"])
    assert 0 < live["server"]["ttft_s"]["mean"] <= live["ttft_s"]["mean"] * 1.01
    stages = sum(seconds for name, seconds in live["stages_s"].items() if name != "decode")
    assert abs(stages - live["ttft_s"]["mean"]) < 0.02


@pytest.mark.long
def test_the_capacity_of_a_live_cluster_is_searched(cluster: LocalServer, tmp_path: Path) -> None:
    write_trace(generate(BUILT_IN["conversation"], num_requests=24, seed=3), tmp_path / "t.jsonl")
    out = tmp_path / "capacity.json"
    words = [sys.executable, "-m", "moonpool", "bench", "capacity", "--url", cluster.url]
    words += ["--trace", str(tmp_path / "t.jsonl"), "--scale-tokens", "1/64", "--start", "20"]
    words += ["--slo-ttft", "20", "--slo-tbt", "5", "--attainment", "0.5", "--runs", "2"]
    done = subprocess.run(
        [*words, "--json", str(out)], check=True, capture_output=True, text=True, timeout=120
    )
    found = json.loads(out.read_text())["capacity"]
    assert found["num_runs"] == 2 and found["ended"] == "runs used up"
    # checks no verdict, because two seeds of so few requests decide little
    assert found["points"][0]["rate"] == 20.0
    assert all(
        run["num_effective"] == run["num_requests"] > 0 for run in found["points"][0]["runs"]
    )
    assert "requests/s" in done.stdout
