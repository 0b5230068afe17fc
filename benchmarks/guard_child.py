"""Measures the package `moonpool` of a folder for `benchmarks.guard`: CPU seconds as JSON.

The workload and the played cluster are those of this checkout; only `moonpool` is the folder's.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import moonpool
from benchmarks.suite.cluster.conductor import bench_conductor
from benchmarks.suite.cluster.simulator import run_one
from moonpool.config.tables import ConductorConfig
from moonpool.gc_tuning import rare_collections

SIZES = ((16, 1500), (200, 1500))
"""Instances and requests of the simulations."""
FLEET = 1000
"""Instances of the decisions, each with ten requests under way and a thousand blocks."""
NUM_DECISIONS = 400


def main(sources: str) -> None:
    found = Path(moonpool.__file__).resolve().parents[1]
    if found != Path(sources).resolve():
        sys.exit(f"python took moonpool from {found}")
    times: dict[str, float] = {}
    with rare_collections():
        for instances, requests in SIZES:
            times[f"{requests:,} requests simulated on {instances} instances"] = _cpu_s(
                lambda size=(instances, requests): run_one(*size)
            )
    gc.collect()
    decisions = bench_conductor(
        (FLEET,), 1000, 10, NUM_DECISIONS, ConductorConfig(), lambda line: None
    )
    median_us = decisions[f"instances_{FLEET}"]["decision_us"]["median"]
    times[f"1,000 decisions among {FLEET:,} instances, by their median"] = median_us / 1e3
    sys.stdout.write(msgspec.json.encode(times).decode())


def _cpu_s(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


if __name__ == "__main__":
    main(sys.argv[1])
