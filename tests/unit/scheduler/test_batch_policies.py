"""Tests the batching policies: the entries of their steps, and the steps that they never plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.scheduler.batching.policies import (
    AlternatingPlanner,
    plan_chunked,
    plan_prefill_first,
    plan_whole_prompts,
)

Shares = list[tuple[str, int]]


def shares(**lengths: int) -> Shares:
    return list(lengths.items())


def decodes(count: int) -> Shares:
    return [(f"d{n}", 1) for n in range(count)]


def prefills(lengths: list[int]) -> Shares:
    return [(f"p{n}", length) for n, length in enumerate(lengths)]


# The policy `chunked`:


@given(
    st.integers(0, 12),
    st.lists(st.integers(1, 50), max_size=8),
    st.integers(1, 60),
    st.integers(1, 12),
)
def test_chunked_steps_stay_within_the_budget_and_keep_the_order(
    num_decodes: int, lengths: list[int], budget: int, most: int
) -> None:
    step = plan_chunked(decodes(num_decodes), prefills(lengths), budget, most)
    wanted = dict(decodes(num_decodes) + prefills(lengths))
    names = [name for name, _ in step]
    num_tokens = sum(share for _, share in step)
    assert num_tokens <= budget and len(names) <= most
    assert names == list(wanted)[: len(names)], "decodes first, then prefills, in order"
    assert all(1 <= share <= wanted[name] for name, share in step)
    cut = [(name, share) for name, share in step if share < wanted[name]]
    assert not cut or cut == [step[-1]], "only the last one is chunked"
    if len(names) < min(most, len(wanted)):
        assert num_tokens == budget, "room was left unused"
    if cut:
        assert num_tokens == budget


def test_a_long_prefill_fills_what_decodes_leave() -> None:
    step = plan_chunked(decodes(3), prefills([100]), 16, 8)
    assert step[-1] == ("p0", 13)
    assert sum(share for _, share in step) == 16


def test_short_prompts_share_a_step() -> None:
    assert [share for _, share in plan_chunked([], prefills([5, 6, 7]), 16, 8)] == [5, 6, 5]


def test_an_empty_step_is_false() -> None:
    assert not plan_chunked([], [], 16, 8)


# Prefill first:


def plan(num_decodes: int, lengths: list[int], budget: int = 100, places: int = 8) -> Shares:
    return plan_prefill_first(decodes(num_decodes), prefills(lengths), budget, places)


def test_prompts_go_first_and_whole() -> None:
    assert plan(3, [60, 40, 1]) == shares(p0=60, p1=40)
    assert plan(3, [60, 41, 1]) == shares(p0=60), "in order: no prompt overtakes another"
    assert plan(3, [250, 10]) == shares(p0=250), "a prompt above the budget runs alone"
    assert plan(3, [10, 10, 10], places=2) == shares(p0=10, p1=10)


def test_decodes_run_when_no_prompt_waits() -> None:
    assert plan(3, []) == decodes(3)
    assert plan(9, [], places=4) == decodes(4)
    assert plan(0, []) == []


@given(st.integers(0, 9), st.lists(st.integers(1, 300), max_size=6), st.integers(1, 200))
def test_never_both_and_never_a_part(num_decodes: int, lengths: list[int], budget: int) -> None:
    planned = dict(plan(num_decodes, lengths, budget))
    if lengths:
        sizes = dict(prefills(lengths))
        assert planned and all(sizes[name] == size for name, size in planned.items())
        assert len(planned) == 1 or sum(planned.values()) <= budget


# Whole prompts:


def test_whole_prompts_run_with_all_decodes() -> None:
    step = plan_whole_prompts(shares(a=1, b=1), shares(c=500, d=300, e=300), 1000, 8)
    assert step == shares(a=1, b=1, c=500, d=300)


def test_the_first_whole_prompt_runs_whatever_the_budget() -> None:
    step = plan_whole_prompts(shares(a=1), shares(c=5000, d=10), 256, 8)
    assert step == shares(a=1, c=5000)


def test_whole_prompts_stop_at_the_number_of_sequences() -> None:
    step = plan_whole_prompts(shares(a=1, b=1), shares(c=5, d=5), 256, 3)
    assert step == shares(a=1, b=1, c=5)


# The alternating policy:


def test_chunks_and_decodes_take_turns() -> None:
    planner = AlternatingPlanner()
    turns = [planner(shares(a=1, b=1), shares(c=500, d=300), 256, 8) for _ in range(4)]
    assert turns == [shares(c=256), shares(a=1, b=1)] * 2


def test_a_side_with_nothing_to_run_loses_its_turn() -> None:
    planner = AlternatingPlanner()
    one, long = shares(a=1), shares(c=500)
    assert planner(one, [], 256, 8) == shares(a=1)
    assert planner(one, long, 256, 8) == shares(c=256)
    assert planner([], long, 256, 8) == shares(c=256)
    assert planner(one, long, 256, 8) == shares(a=1)
    assert not planner([], [], 256, 8)


def test_decodes_in_turns_are_not_cut_by_the_budget() -> None:
    assert len(AlternatingPlanner()(decodes(20), [], 8, 64)) == 20
