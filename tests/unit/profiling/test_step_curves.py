"""Tests measured curves: decode steps by batch size, variation of single steps, tiles and
saturation."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cost.fitted import DecodeSample, FittedCost, scaled
from moonpool_engine.engine.calibrate import find_tile, tile_points
from moonpool_lab.profiling.chunk_sizes import saturation_tokens
from moonpool_lab.profiling.decode_curve import with_decode_curve
from moonpool_lab.profiling.learned_decode_steps import NUM_RATIOS, equally_likely

LINEAR = FittedCost(prefill=(0.0, 1e-4, 0.0, 0.0), decode=(0.009, 0.0008, 5e-7))
BASES_S = {1: 0.0098, 2: 0.0099, 4: 0.0134, 8: 0.0138, 16: 0.0240}
SLOPE_S = 7e-7


def measured() -> list[DecodeSample]:
    return [
        DecodeSample(batch, batch * context, base_s + SLOPE_S * batch * context)
        for batch, base_s in BASES_S.items()
        for context in (64, 512)
    ]


def test_steps_go_through_what_was_measured_and_straight_between() -> None:
    cost = with_decode_curve(LINEAR, measured())
    assert cost.decode[2] == pytest.approx(SLOPE_S, rel=1e-6)
    for sample in measured():
        assert cost.decode_step_s(sample.batch, sample.context_tokens) == pytest.approx(
            sample.seconds
        )
    assert cost.decode_step_s(3, 0) == pytest.approx((BASES_S[2] + BASES_S[4]) / 2)
    assert cost.decode_step_s(20, 0) == pytest.approx(BASES_S[16] + 4 * LINEAR.decode[1])
    assert cost.step_s((), 3, 100) == cost.decode_step_s(3, 100)


def test_many_steps_at_once_are_the_sum_of_single_ones() -> None:
    cost = with_decode_curve(LINEAR, measured())
    single = sum(cost.decode_step_s(3, 100 + 3 * i) for i in range(50))
    assert cost.decode_steps_s(3, 100, 50) == pytest.approx(single)


def test_a_scaled_cost_scales_the_curve() -> None:
    cost = with_decode_curve(LINEAR, measured())
    assert scaled(cost, 1.0, 2.0).decode_step_s(3, 100) == pytest.approx(
        2 * cost.decode_step_s(3, 100)
    )


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(1, 10**5), st.floats(1e-6, 10)), min_size=1)
)
def test_more_never_takes_less(found: list[tuple[int, int, float]]) -> None:
    """This must be true for any measurements, even absurd ones."""
    cost = with_decode_curve(LINEAR, [DecodeSample(b, c, s) for b, c, s in found])
    times = [cost.decode_step_s(batch, 100) for batch in range(1, 40)]
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(times))
    assert cost.decode_step_s(4, 100) <= cost.decode_step_s(4, 200)
    assert min(times) >= 0


def test_a_few_ratios_stand_for_all() -> None:
    rng = random.Random(1)
    ratios = [rng.lognormvariate(0.0, 0.3) for _ in range(1000)]
    kept = equally_likely(ratios)
    assert len(kept) == NUM_RATIOS and list(kept) == sorted(kept)
    assert sum(kept) / NUM_RATIOS == pytest.approx(sum(ratios) / 1000, rel=0.01)
    assert kept[int(0.9 * NUM_RATIOS)] == pytest.approx(sorted(ratios)[900], rel=0.08)
    assert equally_likely(ratios[: NUM_RATIOS - 1]) == ()


def tiled(tile: int, noise: float = 0.0) -> dict[int, float]:
    """Returns a curve that is compute-bound from the first tile on, as on devices with tiles."""
    curve = {}
    for number, tokens in enumerate(tile_points()):
        wobble = 1.0 + noise * (-1) ** number
        curve[tokens] = (0.01 + 1e-4 * (-(-tokens // tile) * tile)) * wobble
    return curve


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_finds_the_tile(tile: int) -> None:
    assert find_tile({n: s - 0.01 for n, s in tiled(tile).items()}) == tile


def test_finds_none_where_there_is_none() -> None:
    assert find_tile(tiled(1)) == 1
    assert find_tile(tiled(4)) == 1


def test_noise_makes_no_tile() -> None:
    assert find_tile(tiled(1, noise=0.003)) == 1


def test_points_that_are_missing_make_no_tile() -> None:
    curve = {n: s for n, s in tiled(128).items() if n <= 257}
    assert find_tile(curve) == 1


def test_saturation_is_the_smallest_chunk_near_the_highest_rate() -> None:
    curve = {tokens: 0.1 + tokens * 1e-3 for tokens in (16, 64, 256, 1024, 4096)}
    curve[4096] *= 1.2  # attention
    assert saturation_tokens(curve) == 1024


def test_saturation_is_in_whole_tiles() -> None:
    curve = {96: 0.1, 128: 0.1, 257: 0.2}
    assert saturation_tokens(curve, 128) == 128
