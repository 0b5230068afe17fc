"""Compares the effective requests of every admission policy with the number that a scheduler with
knowledge of the future could serve.

Each row is one workload on one simulated cluster at one load. `moonpool oracle` runs all policies,
computes a bound that no schedule exceeds, and searches for the best schedule. Generated workloads
have seeds that no other figure of the project uses; recorded traces are named by the caller.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class AdmissionCase(NamedTuple):
    """One workload and cluster to compare. `speeds`: from about half of the cluster's capacity to
    five times the capacity."""

    name: str
    source: str  # a profile of the generator, or the path of a trace file
    flags: tuple[str, ...]
    speeds: tuple[float, ...]


GENERATED = (
    AdmissionCase(
        "conversation, 8P+8D, TBT 0.1 s",
        "conversation",
        ("--prefill", "8", "--decode", "8"),
        (0.8, 1.6, 4.0, 8.0),
    ),
    AdmissionCase(
        "toolagent, 8P+8D, TBT 0.035 s",
        "toolagent",
        ("--prefill", "8", "--decode", "8", "--slo-tbt", "0.035"),
        (0.8, 1.6, 4.0, 8.0),
    ),
    AdmissionCase(
        "toolagent, 12P+4D, TBT 0.035 s",
        "toolagent",
        ("--prefill", "12", "--decode", "4", "--slo-tbt", "0.035"),
        (0.8, 1.6, 4.0),
    ),
    AdmissionCase(
        "long prompts (l-eval), 4P+2D, TBT 0.05 s",
        "l-eval",
        ("--prefill", "4", "--decode", "2", "--slo-tbt", "0.05"),
        (0.5, 1.0, 3.0),
    ),
    AdmissionCase(
        "toolagent, 8 mixed, TBT 0.1 s",
        "toolagent",
        ("--mixed", "8"),
        (0.5, 1.0, 3.0),
    ),
)
RECORDED_FLAGS = ("--prefill", "8", "--decode", "8", "--slo-tbt", "0.035")
RECORDED_SPEEDS = (1.0, 2.0, 4.0, 8.0)
SEED = 4177


def recorded(path: str) -> AdmissionCase:
    """The case of a recorded trace, on the paper's cluster."""
    return AdmissionCase(
        f"{Path(path).stem}, 8P+8D, TBT 0.035 s", path, RECORDED_FLAGS, RECORDED_SPEEDS
    )


class _Job(NamedTuple):
    name: str
    trace: str
    flags: tuple[str, ...]
    speed: float
    requests: int
    runs: int  # number of runs in the search for the best schedule
    result: Path


def compare_admissions(
    cases: Sequence[AdmissionCase], requests: int, runs: int, folder: Path, processes: int
) -> Iterator[dict[str, Any]]:
    """Yields one row per case and speed. `folder` is where traces and results are written. Raises
    RuntimeError with the message of a failed run."""
    jobs: list[_Job] = []
    for case in cases:
        trace = _trace_of(case, requests, folder)
        for speed in case.speeds:
            result = folder / f"{len(jobs)}.json"
            jobs.append(_Job(case.name, trace, case.flags, speed, requests, runs, result))
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(_run, jobs)


def _trace_of(case: AdmissionCase, requests: int, folder: Path) -> str:
    if Path(case.source).exists():
        return case.source
    path = folder / f"{case.source}.jsonl"
    if not path.exists():
        what = ("--profile", case.source, "--requests", str(requests), "--seed", str(SEED))
        _moonpool("trace", "generate", *what, "-o", str(path))
    return str(path)


def _run(job: _Job) -> dict[str, Any]:
    run = ("--trace", job.trace, "--requests", str(job.requests), "--speed", str(job.speed))
    _moonpool("oracle", *run, *job.flags, "--runs", str(job.runs), "--json", str(job.result))
    found = json.loads(job.result.read_text())
    return {
        "workload": job.name,
        "speed": job.speed,
        "requests": found["requests"],
        "bound": found["bound"],
        "best_schedule": found["best_schedule"],
        "effective": {name: one["effective"] for name, one in found["policies"].items()},
    }


def _moonpool(*arguments: str) -> None:
    command = [sys.executable, "-m", "moonpool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{' '.join(command)} failed")
