"""The baseline that lets decodes wait for whole prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.batching.plan import Candidate
from moonpool.batching.prefill_first import plan_prefill_first
from moonpool.types import RequestId


def candidates(sizes: list[int], name: str) -> list[Candidate]:
    return [Candidate(RequestId(f"{name}{i}"), size) for i, size in enumerate(sizes)]


def plan(decodes: int, prompts: list[int], budget: int = 100, places: int = 8) -> dict[str, int]:
    planned = plan_prefill_first(
        candidates([1] * decodes, "d"), candidates(prompts, "p"), budget, places
    )
    return {entry.request_id: entry.num_tokens for entry in planned.entries}


def test_prompts_go_first_and_whole() -> None:
    assert plan(3, [60, 40, 1]) == {"p0": 60, "p1": 40}
    assert plan(3, [60, 41, 1]) == {"p0": 60}, "in their order: none overtakes"
    assert plan(3, [250, 10]) == {"p0": 250}, "a prompt above the budget runs alone"
    assert plan(3, [10, 10, 10], places=2) == {"p0": 10, "p1": 10}


def test_decodes_run_when_no_prompt_waits() -> None:
    assert plan(3, []) == {"d0": 1, "d1": 1, "d2": 1}
    assert plan(9, [], places=4) == {f"d{i}": 1 for i in range(4)}
    assert plan(0, []) == {}


@given(st.integers(0, 9), st.lists(st.integers(1, 300), max_size=6), st.integers(1, 200))
def test_never_both_and_never_a_part(decodes: int, prompts: list[int], budget: int) -> None:
    planned = plan(decodes, prompts, budget)
    if prompts:
        sizes = dict(zip([f"p{i}" for i in range(len(prompts))], prompts, strict=True))
        assert planned and all(sizes[name] == size for name, size in planned.items())
        assert len(planned) == 1 or sum(planned.values()) <= budget
