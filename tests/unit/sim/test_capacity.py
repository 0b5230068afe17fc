"""Tests hit ratios by policy and capacity: small cases by hand, published figures on the real
trace."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from moonpool.sim.capacity import PromptBlocks, prompts_of
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceRow
from moonpool.types import BlockKey
from moonpool_lab.oracle.hit_ratios import (
    Routing,
    belady_hit_ratio,
    hit_ratios,
    split_hit_ratios,
)

TRACE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not here")


def prompt(*names: int, num_tokens: int = 0) -> PromptBlocks:
    keys = [BlockKey(name.to_bytes(8, "big")) for name in names]
    return PromptBlocks(keys, num_tokens or 512 * len(names))


def test_hits_are_counted_by_block_by_prefix_and_by_token() -> None:
    prompts = [prompt(0, 1, 2), prompt(0, 1, 2, num_tokens=1100), prompt(0, 3), prompt(4)]
    ratios = hit_ratios(prompts, "lru", 100)
    assert (ratios.num_prompts, ratios.num_blocks, ratios.hit_blocks) == (4, 9, 4)
    assert ratios.hit_tokens == 1100 + 512
    assert ratios.num_tokens == 3 * 512 + 1100 + 2 * 512 + 512
    assert ratios.by_prefix == ratios.by_block == 4 / 9
    assert ratios == hit_ratios(prompts, "lru", None)


def test_a_block_without_its_predecessor_counts_only_by_block() -> None:
    # LFU keeps the first blocks, which were used twice, but 5 is alone once 4 is evicted.
    prompts = [prompt(0, 1), prompt(0, 1), prompt(4, 5), prompt(9, 5), prompt(7, 8)]
    ratios = hit_ratios(prompts, "lfu", 6)
    assert ratios.hit_blocks == 2
    assert ratios.any_hit_blocks == 3


def test_a_prompt_larger_than_the_cache_keeps_its_beginning() -> None:
    long = prompt(*range(10))
    ratios = hit_ratios([long, long, long], "lru", 4)
    assert ratios.hit_blocks == 8


def test_nothing_served_is_no_division_by_zero() -> None:
    assert hit_ratios([], "lru", 4).by_token == 0
    assert belady_hit_ratio([], 4) == 0


def test_belady_is_the_optimum() -> None:
    prompts = [prompt(name) for name in (0, 1, 2, 0, 1, 2, 0, 1, 2)]
    assert hit_ratios(prompts, "lru", 2).hit_blocks == 0
    assert belady_hit_ratio(prompts, 2) == pytest.approx(3 / 9)
    assert belady_hit_ratio(prompts, 3) == pytest.approx(6 / 9)


@pytest.mark.parametrize("policy", ["lru", "lfu", "length-aware", "predictive"])
def test_no_policy_beats_belady(policy: str) -> None:
    rows = generate(BUILT_IN["conversation"], num_requests=600, seed=1)
    prompts = list(prompts_of(rows, BLOCK_TOKENS, BLOCK_TOKENS))
    for capacity in (300, 1000, 4000):
        best = belady_hit_ratio(prompts, capacity)
        ratios = hit_ratios(prompts, policy, capacity)
        assert ratios.by_prefix <= ratios.by_block <= best


@pytest.mark.long
@pytest.mark.parametrize("name", ["conversation", "toolagent", "synthetic", "simulated-64k"])
def test_predictive_loses_nothing_on_generated_traces(name: str) -> None:
    rows = generate(BUILT_IN[name], num_requests=1500, seed=3)
    prompts = list(prompts_of(rows, BLOCK_TOKENS, BLOCK_TOKENS))
    for capacity in (1000, 5000):
        lru = hit_ratios(prompts, "lru", capacity)
        assert hit_ratios(prompts, "predictive", capacity).by_token > lru.by_token - 0.005


def test_prompts_are_cut_into_blocks_of_either_size() -> None:
    row = TraceRow(0.0, 1300, 5, (7, 8, 9))
    cut = {
        (size, partial): len(next(prompts_of([row], 512, size, partial)).keys)
        for size, partial in ((512, False), (512, True), (256, False), (256, True), (1024, False))
    }
    expected = {(512, False): 2, (512, True): 3, (256, False): 5, (256, True): 6}
    assert cut == {**expected, (1024, False): 1}
    with pytest.raises(ValueError, match="partial blocks"):
        next(prompts_of([row], 512, 1024, True))


def test_routing_by_the_longest_match_alone_fills_one_cache() -> None:
    prompts = [prompt(0, *range(10 * n + 1, 10 * n + 6)) for n in range(1, 41)] * 2
    first = split_hit_ratios(prompts, 4, 100, "first")
    assert first.imbalance == 4
    even = split_hit_ratios(prompts, 4, 100, "least-loaded", ignored_blocks=1)
    assert even.imbalance < 1.1
    assert even.ratios.hit_blocks > 200 > first.ratios.hit_blocks
    in_turn = split_hit_ratios(prompts, 4, 100, "round-robin")
    assert in_turn.imbalance < 1.1
    assert in_turn.ratios.num_prompts == 80


# The figures of the literature:


@cache
def conversation(block_tokens: int = 512, count_partial: bool = True) -> list[PromptBlocks]:
    rows = open_trace(TRACE, spread_ticks=False)
    return list(prompts_of(rows, 512, block_tokens, count_partial))


PUBLISHED = {
    "lru": {None: 0.366, 100_000: 0.364, 50_000: 0.355, 30_000: 0.326, 10_000: 0.211, 5_859: 0.136},
    "lfu": {50_000: 0.344, 30_000: 0.276, 10_000: 0.132},
    "length-aware": {50_000: 0.260, 10_000: 0.112},
}


@pytest.mark.long
@needs_trace
@pytest.mark.parametrize("policy", PUBLISHED)
def test_hit_ratios_by_policy_and_capacity_are_the_known_ones(policy: str) -> None:
    for capacity, expected in PUBLISHED[policy].items():
        ratios = hit_ratios(conversation(), policy, capacity)
        assert ratios.by_prefix == pytest.approx(expected, abs=0.003), capacity
        assert ratios.by_block == pytest.approx(ratios.by_prefix, abs=0.003)


@pytest.mark.long
@needs_trace
def test_belady_shows_the_head_room() -> None:
    assert belady_hit_ratio(conversation(), 5_859) == pytest.approx(0.353, abs=0.001)
    assert belady_hit_ratio(conversation(), 1_000) == pytest.approx(0.191, abs=0.001)


@needs_trace
@pytest.mark.long
def test_predictive_beats_lru_at_small_capacities_and_loses_nothing_at_large_ones() -> None:
    lru = PUBLISHED["lru"]
    for capacity, least in ((5_859, 0.18), (10_000, 0.23)):
        assert hit_ratios(conversation(), "predictive", capacity).by_prefix > least
    assert hit_ratios(conversation(), "predictive", 50_000).by_prefix > lru[50_000] - 0.002
    full_blocks = conversation(count_partial=False)
    assert hit_ratios(full_blocks, "predictive", 10_000).by_prefix > 0.245


FIG_9 = {  # maps a capacity in tokens to the hit ratio: FAST'25 Fig 9, conversation, digitised
    10_000: 0.045,
    100_000: 0.073,
    1_000_000: 0.087,
    2_000_000: 0.12,
    5_000_000: 0.247,
    10_000_000: 0.326,
    50_000_000: 0.398,
    None: 0.401,
}


@needs_trace
@pytest.mark.long
def test_token_hit_ratios_are_near_those_of_the_paper() -> None:
    ours = []
    for capacity_tokens, paper in FIG_9.items():
        capacity = None if capacity_tokens is None else capacity_tokens // 512
        ours.append(hit_ratios(conversation(), "lru", capacity).by_token)
        assert ours[-1] == pytest.approx(paper, abs=0.04), capacity_tokens
    assert all(smaller <= larger for smaller, larger in pairwise(ours))


@needs_trace
@pytest.mark.parametrize(
    ("routing", "ignored_blocks", "hit_ratio", "imbalance"),
    [
        ("least-loaded", 0, 0.138, 10.0),
        ("least-loaded", 1, 0.366, 1.01),
        ("round-robin", 0, 0.106, 1.04),
    ],
)
def test_local_caches_are_as_good_as_their_routing(
    routing: Routing, ignored_blocks: int, hit_ratio: float, imbalance: float
) -> None:
    split = split_hit_ratios(conversation(), 10, 5_859, routing, ignored_blocks)
    assert split.ratios.by_token == pytest.approx(hit_ratio, abs=0.003)
    assert split.imbalance == pytest.approx(imbalance, abs=0.02)
