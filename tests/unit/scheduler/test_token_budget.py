"""Tests the token budget of a step: as large as the SLO allows, in complete tiles, and never
zero."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from moonpool.cost.model import LEAST_CHUNK_TOKENS
from moonpool.scheduler.batching.chunk_budget import token_budget


def linear(base_s: float, token_s: float) -> Callable[[int], float]:
    return lambda tokens: base_s + token_s * tokens


def test_the_whole_budget_where_the_slo_does_not_bind() -> None:
    assert token_budget(linear(0.01, 1e-4), 8, 1.0, 128, 512) == 512


def test_chunk_and_decodes_fill_whole_tiles() -> None:
    """SARATHI section 4.3 gives chunk = k x tile - decodes."""
    budget = token_budget(linear(0.0, 1e-3), 17, 0.3, 128, 1024)
    assert budget == 256, "239 + 17; the next tile would make it 367 ms"


def test_without_tiles_the_largest_budget_that_fits() -> None:
    assert token_budget(linear(0.0, 1e-3), 10, 0.1005, 1, 512) == 110


def test_decodes_that_leave_no_time_leave_the_least_chunk() -> None:
    assert token_budget(linear(1.0, 1e-3), 10, 0.1, 1, 512) == 10 + LEAST_CHUNK_TOKENS
    assert token_budget(linear(1.0, 1e-3), 10, 0.1, 128, 512) == 128
    assert token_budget(linear(1.0, 1e-3), 100, 0.1, 128, 512) == 128, "28 tokens are enough"
    assert token_budget(linear(1.0, 1e-3), 126, 0.1, 128, 512) == 256, "2 tokens are too few"


def test_a_configured_limit_below_a_tile_is_kept() -> None:
    assert token_budget(linear(1.0, 1e-3), 10, 0.1, 128, 64) == 64
    assert token_budget(linear(1.0, 1e-3), 100, 0.1, 1, 64) == 64


@given(
    st.floats(0, 1),
    st.floats(1e-6, 1e-2),
    st.integers(0, 200),
    st.floats(1e-3, 2),
    st.sampled_from((1, 16, 64, 128)),
    st.integers(1, 4096),
)
def test_the_budget_meets_the_slo_or_is_the_least(
    base_s: float, token_s: float, decodes: int, limit_s: float, tile: int, most: int
) -> None:
    step_s = linear(base_s, token_s)
    budget = token_budget(step_s, decodes, limit_s, tile, most)
    least = -(-(decodes + LEAST_CHUNK_TOKENS) // tile) * tile
    assert 0 < budget <= most
    if budget > least:
        assert step_s(budget - decodes) <= limit_s
    if budget < most:
        assert budget % tile == 0 and budget >= least
        larger = min(budget + tile, most // tile * tile)
        assert larger == budget or step_s(larger - decodes) > limit_s, "one more tile would fit"
