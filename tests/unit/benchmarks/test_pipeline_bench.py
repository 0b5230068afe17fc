"""Tests the pipeline's figures: measured beside simulated figures, and bubbles beside
arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.suite.engine.pipeline import PARTS, bench_pipeline, grown, shape_of
from benchmarks.suite.engine.pipelined_instance import PipelinedResult, made_up, simulate
from moonpool.cost.fitted import FittedCost
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.runner import make_layout

pytestmark = pytest.mark.long

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=96,vocab=300"
LINEAR = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.01, 0.0, 0.0))


def simulated(num_stages: int, lengths: list[tuple[int, int]], **config: Any) -> PipelinedResult:
    model = open_model(MODEL, "bfloat16")
    nic = Nic(bytes_per_s=1e18, latency_s=0.0)
    cost = group_cost(LINEAR, shape_of(model.spec), num_stages, "cpp", nic)
    jobs = [made_up(i, *lengths) for i, lengths in enumerate(lengths)]
    return simulate(jobs, cost, make_layout(model, 64), 256, **config)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_equal_chunks_leave_the_bubble_that_filling_and_draining_makes(num_stages: int) -> None:
    ran = simulated(num_stages, [(1600, 1)], chunk_tokens=100)
    assert ran.seconds == pytest.approx(1.6 * (16 + num_stages - 1) / 16 / num_stages)
    assert ran.bubble_share == pytest.approx((num_stages - 1) / (16 + num_stages - 1))


def test_a_whole_prompt_is_no_faster_in_a_pipeline() -> None:
    ran = simulated(4, [(1600, 1)], chunk_tokens=1600, batching="whole-prompts")
    assert ran.seconds == pytest.approx(1.6)
    assert ran.bubble_share == pytest.approx(0.75)


def test_decodes_in_micro_batches_keep_every_stage_busy() -> None:
    ran = simulated(2, [(1, 101)] * 8, chunk_tokens=64)
    assert ran.bubble_share < 0.05
    assert ran.seconds == pytest.approx(100 * 0.01, rel=0.1), "as long as in one process"


def test_a_long_prompt_s_steps_tell_what_shorter_ones_take() -> None:
    samples = grown([1.0, 2.0, 3.0, 4.0, 5.0], prompt_tokens=450, chunk_tokens=100)
    assert [(s.new_tokens, s.seconds) for s in samples] == [
        (100, 1.0),
        (200, 3.0),
        (400, 10.0),
        (450, 15.0),
    ]


def test_all_parts_are_measured_and_simulated() -> None:
    said: list[str] = []
    found = bench_pipeline(MODEL, 2, 512, 64, 48, 1, 0, PARTS, said.append)
    chunked = {row["stages"]: row for row in found["long"]["chunked"]}
    assert set(chunked) == {1, 2, 4}, "the model has no 8 layers"
    assert all("measured" in chunked[x] for x in (1, 2)) and "measured" not in chunked[4]
    assert [row["stages"] for row in found["long"]["whole"]] == [2, 4]
    assert chunked[2]["measured"]["speed_up"] > 0
    assert len(chunked[2]["measured"]["busy_s"]) == 2
    for batching in ("chunked", "whole-prompts"):
        for row in found["mixed"][batching]:
            assert 0 <= row["simulated"]["bubble_share"] < 1
    two = {name: found["decode"][name][0] for name in ("micro-batches", "as they come")}
    assert all(0 <= row["simulated"]["bubble_share"] < 1 for row in two.values())
    assert all(row["measured"]["seconds"] > 0 for row in two.values())
    assert found["short"]["one_s"] > 0 and found["short"]["stages_s"] > 0
    assert len(said) > 10
