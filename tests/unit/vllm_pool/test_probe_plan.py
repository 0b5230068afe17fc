"""Tests the prompts of a proof: their blocks are distinct, mixed, and in no order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool_engine.vllm.cache_layout import CacheGroup, LayoutRefused
from moonpool_engine.vllm.layout_probe import difference
from moonpool_engine.vllm.probe_plan import SPARE_TOKENS, plan_prompts


def groups_of(*block_tokens: int) -> list[CacheGroup]:
    kinds = enumerate(block_tokens)
    return [CacheGroup(i, "full attention", n, None, (f"l{i}",), i, 1) for i, n in kinds]


@given(
    sizes=st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1, max_size=3),
    vocabulary=st.integers(64, 200_000),
    seed=st.integers(0, 100),
)
def test_blocks_are_nobodys_and_each_is_used_once(
    sizes: list[int], vocabulary: int, seed: int
) -> None:
    groups = groups_of(*sizes)
    prompts = plan_prompts(groups, 400, vocabulary, 4096, seed)
    used = [b for p in prompts for ids in (*p.computed, *p.copied) for b in ids]
    assert len(set(used)) == len(used)
    assert 0 not in used and max(used) == 399
    for prompt in prompts:
        assert all(0 <= t < vocabulary for t in prompt.tokens)
        for group, ids in zip(groups, prompt.computed, strict=True):
            assert prompt.prefix_tokens % group.block_tokens == 0
            assert prompt.prefix_tokens < len(prompt.tokens)
            assert len(ids) * group.block_tokens >= len(prompt.tokens) + SPARE_TOKENS
        for one, other in zip(prompt.copied, prompt.reversed_copy(groups), strict=True):
            assert one != other and set(one) == set(other)


def test_a_copy_is_in_no_order() -> None:
    first, second = plan_prompts(groups_of(32), 100, 8192, 4096)
    assert list(first.copied[0]) != sorted(first.copied[0])
    low, high = sorted(first.copied[0]), sorted(second.copied[0])
    assert low[0] < high[-1] and high[0] < low[-1]  # the blocks of both are mixed


def test_too_little_room_is_one_line() -> None:
    with pytest.raises(LayoutRefused, match="a proof needs 19 blocks, vLLM has 18"):
        plan_prompts(groups_of(32), 18, 8192, 4096)
    plan_prompts(groups_of(32), 19, 8192, 4096)
    with pytest.raises(LayoutRefused, match="prompts of 81 tokens, vLLM takes 80"):
        plan_prompts(groups_of(32), 100, 8192, 80)
    short, _ = plan_prompts(groups_of(32), 100, 8192, 81)
    assert (len(short.tokens), short.prefix_tokens) == (81, 64)


def test_differences_of_log_probabilities() -> None:
    one = [{1: -0.5, 2: -1.0}]
    assert difference(one, [dict(one[0])]) == 0.0
    assert difference(one, [{1: -0.75, 2: -1.0}]) == 0.25
    # a missing token counts like the least likely listed one
    assert difference(one, [{1: -0.5, 3: -1.5}]) == 0.5
    assert difference(one, [{1: float("nan"), 2: -1.0}]) == float("inf")
    assert difference([{}], [{}]) == 0.0  # a rank that lacks the last layer reports no token
