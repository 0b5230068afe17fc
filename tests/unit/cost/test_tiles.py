"""A curve of step times tells the tile, and where throughput ends to grow."""

from __future__ import annotations

import pytest

from moonpool.cost.tiles import find_tile, saturation_tokens, tile_points


def tiled(tile: int, noise: float = 0.0) -> dict[int, float]:
    """Compute-bound from the first tile on, as devices with tiles are."""
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
