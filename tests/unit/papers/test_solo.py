"""An instance alone serves every job, in the steps that its batching decides."""

from __future__ import annotations

import pytest

from moonpool.config.tables import Batching
from papers.constants import pipeline, roofline
from papers.single_instance import SoloConfig, SoloRequest, SoloResult, all_at_once, serve

COST = roofline("A6000", "llama2-13b")
SHAPE = COST.shape


def run(jobs: list[SoloRequest], batching: Batching = "chunked", **changes: int) -> SoloResult:
    settings = {"chunk_tokens": 256, "max_sequences": 4, "kv_tokens": 1 << 20} | changes
    stages = settings.pop("stages", 1)
    cost = pipeline(COST, stages) if stages > 1 else COST
    return serve(jobs, cost, SHAPE, SoloConfig(batching, **settings, steps_in_flight=stages))


@pytest.mark.parametrize("batching", ["chunked", "prefill-first", "whole-prompts", "alternating"])
@pytest.mark.parametrize("stages", [1, 4])
def test_all_tokens_come_in_every_way_of_batching(batching: Batching, stages: int) -> None:
    jobs = [SoloRequest(0.05 * n, 100 + 37 * n, 1 + n % 7) for n in range(30)]
    served = run(jobs, batching, stages=stages)
    assert served.gap_s.count == sum(job.output_tokens - 1 for job in jobs)
    for job, ttft_s, finished_s in zip(jobs, served.ttft_s, served.finished_s, strict=True):
        assert ttft_s > 0
        assert finished_s >= job.arrived_s + ttft_s - 1e-9
    assert sum(step.chunk_tokens for step in served.steps) == sum(j.prompt_tokens for j in jobs)


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    served = run([SoloRequest(1.0, 200, 3)])
    prefill_s = COST.prefill_s(200, 0)
    decodes_s = [COST.decode_step_s(1, context) for context in (201, 202)]
    assert served.ttft_s[0] == pytest.approx(prefill_s)
    assert served.finished_s[0] == pytest.approx(1.0 + prefill_s + sum(decodes_s))
    assert served.makespan_s == served.finished_s[0]


def test_chunked_steps_keep_to_the_budget_and_others_do_not_mix_or_cut() -> None:
    jobs = all_at_once([(600, 5)] * 8)
    chunked = run(jobs)
    assert max(step.chunk_tokens + step.num_decodes for step in chunked.steps) == 256
    assert any(step.chunk_tokens and step.num_decodes for step in chunked.steps)
    for batching in ("prefill-first", "alternating"):
        apart = run(jobs, batching)
        assert not any(step.chunk_tokens and step.num_decodes for step in apart.steps)
    whole = run(jobs, "whole-prompts")
    assert {step.chunk_tokens for step in whole.steps} <= {0, 600}


def test_progress_is_told_once_for_each_request() -> None:
    heard: list[int] = []
    config = SoloConfig("chunked", 256, 4, 1 << 20)
    serve(all_at_once([(100, 2)] * 5), COST, SHAPE, config, heard.append)
    assert heard == [1, 2, 3, 4, 5]


def test_a_request_that_cannot_fit_is_not_passed_over_in_silence() -> None:
    with pytest.raises(AssertionError, match="more blocks"):
        run([SoloRequest(0.0, 1000, 2)], kv_tokens=512)
