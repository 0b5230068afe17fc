"""Tests the proof of plans: it must find the cheaper cluster that a plan has missed."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.suite.cluster.plan_proof import WITHIN, PlanProof, prove
from benchmarks.suite.cluster.plan_workloads import PROOF_WORKLOADS
from moonpool.plan.assess import Assessor, PlanGoal
from moonpool.plan.candidate import Steps
from moonpool.plan.simulation_pool import SimulationPool
from tests.cli_runner import invoke


@pytest.fixture
def proof() -> PlanProof:
    """The workload has 30 prompts of 16k tokens, of which half is cached. Two mixed nodes serve
    them, and one node suffices."""
    [workload] = [one for one in PROOF_WORKLOADS if one.name == "half cached, 16k"]
    made = prove(workload._replace(rate_rps=0.4), 30, 2)
    steps = Steps((125_000, 500_000), (0,), ("lru",), (256, 1024))
    made.prepared = msgspec.structs.replace(made.prepared, steps=steps)
    return made


@pytest.mark.long
def test_a_plan_that_is_too_dear_is_found_out(proof: PlanProof) -> None:
    [mixed] = [start for start in proof.prepared.starts if start.mixed]
    dear = msgspec.structs.replace(mixed, mixed=2, cache_tokens=500_000, chunk_tokens=256)
    with SimulationPool(proof.workload, 1) as pool_of_runs:
        assessor = Assessor(pool_of_runs, proof.base, PlanGoal(), proof.priced)
        assert assessor.look([dear])[0].share >= 0.9
        choice = assessor.known(dear)
        proof.search(assessor, choice)
        assert proof.found
        for one in proof.found:
            assert proof.priced.usd_per_h(one) * (1 + WITHIN) <= choice.usd_per_h
            assert assessor.looks[one].share >= 0.9
    counts = proof.counts
    decided = counts["arithmetic"] + counts["clear"] + counts["simulated"]
    assert decided == counts["candidates"] > 10


@pytest.mark.long
def test_the_right_plan_is_confirmed(proof: PlanProof) -> None:
    found = proof.run(2, lambda text: None)
    assert found["right"] and found["cheaper"] is None and found["audited_kept"] == 0
    assert found["named"]["share"] >= 0.9 and len(found["fresh"]) == 4


@pytest.mark.long
def test_the_workloads_are_many_kinds() -> None:
    assert len(PROOF_WORKLOADS) == 12 == len({one.name for one in PROOF_WORKLOADS})
    assert sum(one.profile.burst_short_cv2 >= 1 for one in PROOF_WORKLOADS) >= 3
    assert sum(not one.block_tokens for one in PROOF_WORKLOADS) >= 2
    for one in PROOF_WORKLOADS:
        assert one.rows(20) == one.rows(20)


def test_an_unknown_workload_is_one_line() -> None:
    done = invoke("bench", "plan", "--workload", "13")
    assert done.exit_code == 1 and done.stderr == "moonpool: --workload must be 1 to 12\n"
