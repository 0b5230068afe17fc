"""Chunked batches: within the budget, in order, and no decode ever waits for a prefill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.batching.chunked import plan_chunked
from moonpool.batching.plan import BatchPlan, Candidate
from moonpool.types import RequestId


def decodes(count: int) -> list[Candidate]:
    return [Candidate(RequestId(f"d{n}"), 1) for n in range(count)]


def prefills(lengths: list[int]) -> list[Candidate]:
    return [Candidate(RequestId(f"p{n}"), length) for n, length in enumerate(lengths)]


@given(
    st.integers(0, 12),
    st.lists(st.integers(1, 50), max_size=8),
    st.integers(1, 60),
    st.integers(1, 12),
)
def test_properties(num_decodes: int, lengths: list[int], budget: int, most: int) -> None:
    plan = plan_chunked(decodes(num_decodes), prefills(lengths), budget, most)
    wanted = {c.request_id: c.num_uncomputed for c in decodes(num_decodes) + prefills(lengths)}
    names = [entry.request_id for entry in plan.entries]
    assert plan.num_tokens <= budget and len(names) <= most
    assert names == list(wanted)[: len(names)], "decodes first, then prefills, in their order"
    assert all(1 <= entry.num_tokens <= wanted[entry.request_id] for entry in plan.entries)
    cut = [e for e in plan.entries if e.num_tokens < wanted[e.request_id]]
    assert not cut or cut == [plan.entries[-1]], "only the last one is chunked"
    if len(names) < min(most, len(wanted)):
        assert plan.num_tokens == budget, "room was left unused"
    if cut:
        assert plan.num_tokens == budget


def test_a_long_prefill_fills_what_decodes_leave() -> None:
    plan = plan_chunked(decodes(3), prefills([100]), 16, 8)
    assert [(e.request_id, e.num_tokens) for e in plan.entries][-1] == ("p0", 13)
    assert plan.num_tokens == 16


def test_short_prompts_share_a_step() -> None:
    plan = plan_chunked([], prefills([5, 6, 7]), 16, 8)
    assert [e.num_tokens for e in plan.entries] == [5, 6, 5]


def test_nothing_to_do_is_false() -> None:
    assert not plan_chunked([], [], 16, 8)
    assert BatchPlan(()).num_tokens == 0
