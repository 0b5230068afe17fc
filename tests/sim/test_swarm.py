"""Runs the whole pure core in hundreds of seeded runs. `test_mutants` shows which bugs they
notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.swarm import run_seed

SEEDS_PER_TEST = 25
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in range(SEEDS_PER_TEST, 150, SEEDS_PER_TEST)
        ),
    ],
)
def test_invariants_hold(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        world = run_seed(seed)  # if a check fails, raises SeedFailed with the seed and its options
        assert world.lost_with_head | set(world.ended) == set(world.truths)


@pytest.mark.parametrize("seed", [3432, 7246, 20542, 90613, 91821, 771299, 4500104])
def test_seeds_that_failed_once(seed: int) -> None:
    """Seed 3432: a drain that was shortened still announced its first end. Seed 7246: the abort of
    a prefill broke its stream before the abort of the decode arrived, so the decode instance
    computed the prompt again. Seed 20542: the pool took an owner's blocks of two prompts for those
    of one prompt. Their links formed a cycle, so the list of the hottest prefixes never ended. Seed
    91821: two requests fitted together by their tokens, but not by their blocks. Seed 771299: a
    spare block that the policy did not evict lost its mark. Seed 4500104: a request of which both
    instances left was moved twice in one turn."""
    assert run_seed(seed).ended


CORNERS = {
    "separate roles",
    "FetchBlocks",
    "early steps",
    "early steps by load",
    "missed shares",
    "StoreBlocks",
    "LoadBlocks",
    "hung disks",
    "StopReceiving",
    "SwitchRole",
    "role is a ",
    "role was lost ",
    "CancelStream",
    "AbortStream",
    "StepFailed",
    "InstanceLost",
    "counter preemptions",
    "counter corrupt_slices",
    "counter failed_streams",
    "outcome stop",
    "stop strings",
    "outcome length",
    "outcome abort",
    "outcome deadline",
    "outcome tbt_slo_late",
    "outcome decode_load",
    "outcome decode_load_predicted",
    "outcome ttft_slo",
    "outcome no_decode_capacity",
    "outcome refused_by_engine",
    "requests that yield",
    "waiting requests of several tenants",
    "upgrades",
    "protocol before",
    "protocol newest",
    "leaders heard",
    "paused heads",
    "paused instances",
    "silent instances",
    "vLLM handovers",
    "vLLM handovers lost",
    "vLLM preemptions",
    "lost KV events",
    "counter failed_works",
}


@pytest.mark.long
def test_runs_reach_every_corner() -> None:
    """Whether the runs cover these cases, because runs without a preemption, fetch or broken stream
    prove nothing about it. The rarest cases occur once in some hundred runs."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 2000):
        seen += run_seed(seed).seen
        if seen.keys() >= CORNERS:
            break
    assert not CORNERS - seen.keys()
    assert seen["outcome length"] + seen["outcome stop"] > seen["RequestArrived"] / 2


@pytest.mark.long
def test_equal_seeds_give_equal_runs() -> None:
    """Whether a run can be repeated: no decision may depend on the order of a set."""
    program = (
        "from tests.sim.swarm import run_seed; print([run_seed(s).fingerprint for s in (3, 8)])"
    )
    prints = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        prints.add(run.stdout)
    assert len(prints) == 1
