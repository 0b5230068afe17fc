"""The batching policies that are there to be compared with."""

from __future__ import annotations

from moonpool.batching.alternating import AlternatingPlanner
from moonpool.batching.plan import BatchPlan, Candidate
from moonpool.batching.whole_prompts import plan_whole_prompts
from moonpool.types import RequestId


def candidates(**lengths: int) -> list[Candidate]:
    return [Candidate(RequestId(name), tokens) for name, tokens in lengths.items()]


def shares(plan: BatchPlan) -> dict[str, int]:
    return {str(entry.request_id): entry.num_tokens for entry in plan.entries}


def test_whole_prompts_run_beside_all_decodes() -> None:
    plan = plan_whole_prompts(candidates(a=1, b=1), candidates(c=500, d=300, e=300), 1000, 8)
    assert shares(plan) == {"a": 1, "b": 1, "c": 500, "d": 300}


def test_the_first_whole_prompt_runs_whatever_the_budget() -> None:
    plan = plan_whole_prompts(candidates(a=1), candidates(c=5000, d=10), 256, 8)
    assert shares(plan) == {"a": 1, "c": 5000}


def test_whole_prompts_stop_at_the_number_of_sequences() -> None:
    plan = plan_whole_prompts(candidates(a=1, b=1), candidates(c=5, d=5), 256, 3)
    assert shares(plan) == {"a": 1, "b": 1, "c": 5}


def test_chunks_and_decodes_take_turns() -> None:
    plan = AlternatingPlanner()
    decodes, prefills = candidates(a=1, b=1), candidates(c=500, d=300)
    turns = [shares(plan(decodes, prefills, 256, 8)) for _ in range(4)]
    assert turns == [{"c": 256}, {"a": 1, "b": 1}] * 2


def test_an_empty_turn_goes_to_the_other_side() -> None:
    plan = AlternatingPlanner()
    decodes, prefills = candidates(a=1), candidates(c=500)
    assert shares(plan(decodes, [], 256, 8)) == {"a": 1}
    assert shares(plan(decodes, prefills, 256, 8)) == {"c": 256}
    assert shares(plan([], prefills, 256, 8)) == {"c": 256}
    assert shares(plan(decodes, prefills, 256, 8)) == {"a": 1}
    assert not plan([], [], 256, 8)


def test_decodes_in_turns_are_not_cut_by_the_budget() -> None:
    many = [Candidate(RequestId(str(i)), 1) for i in range(20)]
    assert len(AlternatingPlanner()(many, [], 8, 64).entries) == 20
