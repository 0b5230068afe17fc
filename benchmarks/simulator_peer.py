"""CPU time and memory of `moonpool simulate` beside NVIDIA Dynamo's offline replay of one trace.

    python -m benchmarks.simulator_peer TRACE --dynamo-python PYTHON [--rounds N] [--json FILE]

Both replay the same requests on as many instances with KV-aware placement, chunks of 8,192 tokens
and 5,000 blocks of 512, in turns, each run in a separate process. The time of the whole process
counts: imports, reading the trace, simulating. The least CPU time of each counts. The two have
different models of time, so latencies are not compared. PYTHON has Dynamo:
`pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1`, and
`pip install msgspec 'pydantic<=2.13.5' uvloop numpy`, with Python 3.12.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkout import ROOT
from moonpool.cli.output import origin, write_json

ROWS = ((8, 8, 1.0), (500, 500, 50.0))
"""Prefill instances, decode instances, times the trace's speed."""
MOST_S = 3600.0
CONFIG = """
[pool]
block_tokens = 512
dram_tokens_per_instance = 2_560_000
[engine]
max_sequences = 256
chunk_tokens = 8192
"""
"""The instances are those of `REPLAY`, because smaller chunks and blocks would cost more events."""

REPLAY = """
import json, sys
from dynamo.replay.api import run_trace_replay
trace, prefill, decode, speed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
engine = {"block_size": 512, "num_gpu_blocks": 5000, "max_num_seqs": 256,
          "max_num_batched_tokens": 8192}
roles = [json.dumps({"engine": engine | {"worker_type": role}}) for role in ("prefill", "decode")]
run_trace_replay(
    trace, arrival_speedup_ratio=speed, router_mode="kv_router", trace_block_size=512,
    sla_ttft_ms=30000, sla_itl_ms=100, prefill_engine_args=roles[0], decode_engine_args=roles[1],
    num_prefill_workers=prefill, num_decode_workers=decode)
"""


class PeerError(Exception):
    """A run failed; the message says which and why, in one line."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator_peer")
    parser.add_argument("trace", type=Path, help="in Mooncake's format")
    parser.add_argument("--dynamo-python", required=True, help="a Python that has Dynamo")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--json", help="keep the figures in this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    rows = []
    try:
        for size in ROWS:
            rows.append(compare(arguments.trace, arguments.dynamo_python, size, arguments.rounds))
            print("\n".join(lines_of(rows[-1])), flush=True)
    except PeerError as error:
        print(f"simulator_peer: {error}", file=sys.stderr)
        return 2
    command = " ".join(["python -m benchmarks.simulator_peer", *sys.argv[1:]])
    write_json(arguments.json, {"rows": rows, "origin": origin() | {"command": command}})
    return 0


def compare(
    trace: Path, dynamo_python: str, size: tuple[int, int, float], rounds: int
) -> dict[str, Any]:
    """Returns the least CPU time of each, in runs that alternate. Raises PeerError."""
    prefill, decode, speed = size
    counts = [str(prefill), str(decode), f"{speed:g}"]
    flags = ["--prefill", counts[0], "--decode", counts[1], "--speed", counts[2]]
    path = str(trace.absolute())
    with tempfile.TemporaryDirectory() as folder:
        figures, config = Path(folder) / "figures.json", Path(folder) / "cluster.toml"
        config.write_text(CONFIG, encoding="utf-8")
        flags += ["--config", str(config)]
        ours = [sys.executable, "-m", "moonpool", "simulate", "--trace", path, *flags]
        commands = {
            "moonpool": [*ours, "--json", str(figures)],
            "dynamo": [dynamo_python, "-c", REPLAY, path, *counts],
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for number in range(rounds):
            order = list(commands) if number % 2 == 0 else list(commands)[::-1]
            for name in order:
                runs[name].append(measured(name, commands[name]))
        requests = int(msgspec.json.decode(figures.read_bytes())["requests"])
    row: dict[str, Any] = {"size": size, "requests": requests}
    for name, found in runs.items():
        cpu_s = min(one["cpu_s"] for one in found)
        peak_mb = max(one["peak_mb"] for one in found)
        row[name] = {"cpu_s": cpu_s, "ms": cpu_s / requests * 1e3, "peak_mb": peak_mb}
    return row


def measured(name: str, command: list[str]) -> dict[str, float]:
    """Returns the CPU seconds and the peak memory of one process, with all child processes that it
    waited for. Raises PeerError."""
    with tempfile.TemporaryFile() as said:
        program = shutil.which(command[0]) or command[0]  # the child runs in another folder
        limited = ["timeout", f"{MOST_S:g}", os.path.abspath(program), *command[1:]]
        child = subprocess.Popen(limited, stdout=said, stderr=said, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            why = last[0] if last else "it said nothing"
            raise PeerError(f"{name} ended with status {child.returncode}: {why}")
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1024}


def lines_of(row: dict[str, Any]) -> list[str]:
    """Returns one size of the table as lines."""
    prefill, decode, speed = row["size"]
    ratio = row["moonpool"]["cpu_s"] / row["dynamo"]["cpu_s"]
    size = (
        f"{prefill} prefill + {decode} decode, {speed:g} x the speed, {row['requests']:,} requests"
    )
    lines = [f"{size}: moonpool takes {ratio:.2f} x the CPU time"]
    for name in ("moonpool", "dynamo"):
        found = row[name]
        times = f"{found['cpu_s']:8.2f} s  {found['ms']:7.3f} ms a request"
        lines.append(f"  {name:9} {times}  {found['peak_mb']:6.0f} MB")
    return lines


if __name__ == "__main__":
    sys.exit(main())
