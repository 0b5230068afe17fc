"""Measures the package `moonpool` of a folder for `benchmarks.guard`: CPU seconds as JSON.

The workload and the simulated cluster are those of this checkout; only `moonpool` comes from the
folder.
"""

from __future__ import annotations

import gc
import sys
import time
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
            began_s = time.process_time()
            run_one(instances, requests)
            name = f"{requests:,} requests simulated on {instances} instances"
            times[name] = time.process_time() - began_s
    gc.collect()
    decisions = bench_conductor(
        (FLEET,), 1000, 10, NUM_DECISIONS, ConductorConfig(), lambda line: None
    )
    median_us = decisions[f"instances_{FLEET}"]["decision_us"]["median"]
    times[f"1,000 decisions among {FLEET:,} instances, by their median"] = median_us / 1e3
    sys.stdout.write(msgspec.json.encode(times).decode())


if __name__ == "__main__":
    main(sys.argv[1])
