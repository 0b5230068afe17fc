"""Tests histograms of measured over predicted times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.distributions import (
    NUM_BINS,
    RatioHistogram,
    edge,
    position,
    share_at,
)

RATIOS = st.floats(0.26, 7.9)


@given(st.integers(0, NUM_BINS - 1))
def test_an_edge_is_where_its_bin_begins(index: int) -> None:
    assert position(edge(index)) == index


@given(RATIOS, RATIOS)
def test_positions_rise_with_ratios(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert position(low) <= position(high)


@given(st.lists(RATIOS, min_size=1, max_size=40), RATIOS)
def test_a_share_is_that_of_the_values_below(values: list[float], ratio: float) -> None:
    histogram = RatioHistogram([1.0], 1e-9)
    for value in values:
        histogram.add(value)
    shares = histogram.shares()
    place = int(position(ratio))
    surely = sum(int(position(value)) < place for value in values) / len(values)
    perhaps = sum(int(position(value)) <= place for value in values) / len(values)
    assert surely - 1e-6 <= share_at(shares, ratio) <= perhaps + 1e-6


def test_extremes_count_as_the_ends() -> None:
    shares = RatioHistogram([1.0], 1.0).shares()
    assert share_at(shares, 1e-30) == 0.0
    assert share_at(shares, 1e30) == share_at(shares, float("inf")) == 1.0


def test_old_values_fade() -> None:
    histogram = RatioHistogram([1.0], 1.0)
    for ratio in [1.0] * 2000 + [4.0] * 2000:
        histogram.add(ratio)
    assert share_at(histogram.shares(), 2.0) < 0.3
    assert histogram.quantile(0.9) == pytest.approx(4.0, rel=0.05)
