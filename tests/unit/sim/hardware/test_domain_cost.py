"""Tests that a measured cost counts inside its domain, the roofline outside, and that times do not
jump at the border."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.cost.model import Chunk, StepCost, prompt_chunks, prompt_s
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.domain_cost import CHUNK_TOKENS, DomainCost
from moonpool.sim.hardware.roofline import RooflineCost

ROOFLINE = RooflineCost(BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b"), 8)
COST = DomainCost(CALIBRATED, ROOFLINE)
HITS = (0.0, 0.5, 0.9, 0.95, 0.99)


def alone_s(num_tokens: int, cached_tokens: int, cost: StepCost = COST) -> float:
    return prompt_s(cost, num_tokens, cached_tokens, CHUNK_TOKENS)


def prompts(num: int, num_tokens: int, cached_tokens: int = 0) -> list[Chunk]:
    return [*prompt_chunks(num_tokens, cached_tokens, num_tokens)] * num


@given(st.integers(8192, 131_072), st.floats(0.0, 0.95))
def test_a_prompt_of_the_domain_costs_what_was_measured(num_tokens: int, hit: float) -> None:
    cached = int(hit * num_tokens)
    measured_s = CALIBRATED.prefill_s(num_tokens, cached)
    assert alone_s(num_tokens, cached) == pytest.approx(measured_s, rel=1e-9)


@given(st.integers(1, 16), st.integers(8192, 131_072))
def test_a_decode_step_of_the_domain_costs_what_was_measured(batch: int, context: int) -> None:
    measured_s = CALIBRATED.decode_step_s(batch, context)
    assert COST.step_s((), batch, context) == pytest.approx(measured_s, rel=1e-12)


def test_eight_short_prompts_in_a_step_cost_what_the_roofline_says() -> None:
    step = prompts(8, 256)
    assert COST.step_s(step, 0, 0) == ROOFLINE.step_s(step, 0, 0) == pytest.approx(0.263, abs=5e-4)


@pytest.mark.parametrize("num_tokens", [1, 64, 2048, 4096, 262_144, 500_000])
@pytest.mark.parametrize("hit", HITS)
def test_far_outside_the_roofline_alone_remains(num_tokens: int, hit: float) -> None:
    cached = int(hit * num_tokens)
    assert alone_s(num_tokens, cached) == alone_s(num_tokens, cached, ROOFLINE)


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("border", [4096, 8192, 131_072, 262_144])
def test_there_is_no_cliff_at_a_border_of_the_prompts(border: int, hit: float) -> None:
    """The jump must not exceed the jumps of the roofline itself, at the ends of tiles and of
    steps."""
    for one, next_one in ((border - 1, border), (border, border + 1)):
        times_s = [alone_s(n, int(hit * n)) for n in (one, next_one)]
        roofline_s = [alone_s(n, int(hit * n), ROOFLINE) for n in (one, next_one)]
        own_s = max(roofline_s[1] - roofline_s[0], 0.0)
        assert abs(times_s[1] - times_s[0]) < own_s + 1e-3 * times_s[0]


def test_there_is_no_cliff_where_more_is_cached_than_was_measured() -> None:
    cached = int(0.95 * 65_536)
    assert alone_s(65_536, cached) == pytest.approx(alone_s(65_536, cached + 1), rel=1e-3)


@given(st.integers(1, 200), st.integers(0, 2_000_000))
def test_decode_steps_do_not_jump(batch: int, context: int) -> None:
    step_s = COST.step_s((), batch, context)
    assert step_s <= COST.step_s((), batch, context + 1) <= step_s + 1e-6
    own_s = ROOFLINE.step_s((), batch + 1, context) - ROOFLINE.step_s((), batch, context)
    assert step_s <= COST.step_s((), batch + 1, context) <= step_s + own_s + 2e-4


@pytest.mark.parametrize("hit", HITS)
def test_a_longer_prompt_costs_more(hit: float) -> None:
    lengths = [*range(16, 9000, 37), *range(9000, 300_000, 4999)]
    times_s = [alone_s(n, int(hit * n)) for n in lengths]
    steps_s = [after - before for before, after in pairwise(times_s)]
    # Rounding the cached tokens down can remove a token from the computed tokens.
    assert min(steps_s) > -2e-4


@pytest.mark.parametrize("num_tokens", [2000, 5000, 8192, 100_000, 200_000])
def test_a_prompt_with_more_in_the_cache_costs_less(num_tokens: int) -> None:
    times_s = [alone_s(num_tokens, cached) for cached in range(0, num_tokens, num_tokens // 97)]
    assert times_s == sorted(times_s, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.integers(1, 20_000), st.floats(0.0, 0.99))
def test_prompts_in_a_step_cost_at_most_their_sum_and_at_least_the_largest(
    num: int, num_tokens: int, hit: float
) -> None:
    step = prompts(num, num_tokens, int(hit * num_tokens)) + prompts(1, 3 * num_tokens)
    parts_s = [COST.step_s((chunk,), 0, 0) for chunk in step]
    together_s = COST.step_s(step, 0, 0)
    assert max(parts_s) <= together_s <= math.fsum(parts_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 100_000), st.integers(1, 256), st.integers(1, 4000))
def test_a_mixed_step_lies_between_its_longest_part_and_the_sum(
    num_tokens: int, start: int, batch: int, context: int
) -> None:
    chunk = Chunk(num_tokens, start, 0, True, start + num_tokens)
    chunk_s, decodes_s = COST.step_s((chunk,), 0, 0), COST.step_s((), batch, batch * context)
    mixed_s = COST.step_s((chunk,), batch, batch * context)
    assert max(chunk_s, decodes_s) <= mixed_s <= chunk_s + decodes_s


def test_a_decode_beside_a_full_chunk_does_not_read_the_weights_again() -> None:
    (chunk,) = prompts(1, 2048)
    added_s = COST.step_s((chunk,), 4, 2048) - COST.step_s((chunk,), 0, 0)
    assert added_s < COST.step_s((), 4, 2048) / 2
