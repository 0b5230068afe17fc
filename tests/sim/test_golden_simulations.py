"""Tests golden figures: fixed workloads give the same simulated figures, to the last bit.

A change of the structure must not change the figures. After a change of a decision, run `python -m
tests.sim.test_golden_simulations` and say in the commit why the figures moved.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runner import succeed

GOLDEN = Path(__file__).parents[1] / "golden" / "simulations.json"
VOLATILE = {"wall_s", "config", "version", "origin"}
WORKLOADS = {
    "conversation": ("--profile", "conversation", "--requests", "400", "--seed", "3"),
    "toolagent": ("--profile", "toolagent", "--requests", "400", "--seed", "5"),
}
RUNS = {
    "default": "conversation",
    "predictive": "conversation --admission predictive --speed 12 --prefill 2 --decode 2",
    "goodput": "toolagent --admission goodput --speed 12 --prefill 2 --decode 2 --slo-tbt 0.035",
    "length": (
        "toolagent --admission predictive --decode-prediction length --speed 16 --prefill "
        "1 --decode 2"
    ),
    "baseline": "conversation --admission baseline --speed 16 --prefill 2 --decode 1",
    "mixed": "toolagent --mixed 4 --prefill 0 --decode 0 --speed 4",
    "random": "conversation --placement random --seed 7 --noise 0.05 --speed 4",
    "cache-aware": "toolagent --placement cache-aware --kv-tokens 400000 --eviction predictive",
    "ssd": (
        "toolagent --kv-tokens 300000 --ssd-tokens 1000000 --eviction lfu --prefill 2 --decode 2"
    ),
    "switch": "conversation --role-balance switch --speed 8 --prefill 3 --decode 3",
    "attention": (
        "conversation --cost roofline --scale-tokens 1/4 --attention 2 --attention-device "
        "H20 --attention-devices-per-node 8 --prefill 2 --decode 2"
    ),
    "stages": (
        "conversation --cost roofline --scale-tokens 1/4 --pipeline-parallel-size 2 "
        "--prefill 2 --decode 2"
    ),
    "prefill-first": "toolagent --mixed 2 --prefill 0 --decode 0 --batching prefill-first",
}


def simulate(name: str, folder: Path) -> dict[str, Any]:
    """Returns the figures of one run, without figures that depend on the machine."""
    workload, *flags = RUNS[name].split()
    trace, figures = folder / f"{workload}.jsonl", folder / f"{name}.json"
    if not trace.exists():
        succeed("trace", "generate", *WORKLOADS[workload], "-o", trace)
    succeed("simulate", "--trace", trace, *flags, "--json", figures)
    found: dict[str, Any] = json.loads(figures.read_text())
    del found["run"]["trace_sha256"]
    return {key: value for key, value in found.items() if key not in VOLATILE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


QUICK = {"default", "goodput", "mixed", "ssd"}  # the long run plays the other scenarios


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_figures_are_the_golden_ones(name: str, folder: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    assert simulate(name, folder) == golden


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        figures = {name: simulate(name, Path(place)) for name in RUNS}
    GOLDEN.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"wrote {GOLDEN}\n")
