"""Tests an instance on the cost model's clock: `bench sarathi` predicts with it."""

from __future__ import annotations

import pytest

from benchmarks.suite.engine.timed_instance import TimedJob, TimedResult, serve
from moonpool.config.tables import Batching
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.scheduler.instance_config import InstanceConfig

COST = FittedCost(prefill=(0.0, 1e-3, 0.0, 0.0), decode=(0.01, 1e-3, 0.0))
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
)


def run(
    jobs: list[TimedJob], batching: Batching = "chunked", tbt_s: float = float("inf")
) -> TimedResult:
    config = InstanceConfig(batching=batching, tbt_slo_s=tbt_s, prefix_caching=False)
    return serve(jobs, config, LAYOUT, 1000, COST)


def test_times_follow_from_the_costs() -> None:
    timed = run([TimedJob(0.0, 100, 3), TimedJob(5.0, 200, 1)])
    assert timed.ttft_s == pytest.approx([0.1, 0.2])
    assert timed.gaps_s == pytest.approx([0.011, 0.011])
    assert timed.makespan_s == pytest.approx(5.2)
    assert timed.held_block_s == pytest.approx([7 * 0.1, 13 * 0.2])


def test_a_whole_prompt_stalls_decodes_and_the_budget_does_not() -> None:
    jobs = [TimedJob(0.0, 16, 100), TimedJob(0.1, 400, 2)]
    assert max(run(jobs, "whole-prompts").gaps_s) > 0.4
    assert max(run(jobs, "prefill-first").gaps_s) > 0.4
    assert max(run(jobs, "chunked", 0.1).gaps_s) <= 0.1
