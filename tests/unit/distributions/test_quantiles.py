"""Tests the rules for a quantile against their definitions, and the histogram against the exact
rule."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.distributions import (
    GROWTH,
    Histogram,
    interpolated,
    nearest_bin,
    nearest_rank,
    percentiles,
    rank_above,
)

VALUES = st.lists(st.integers(0, 20), min_size=1, max_size=60).map(sorted)
PERCENTS = st.integers(0, 100)


@given(VALUES, PERCENTS)
def test_the_nearest_rank_is_the_smallest_value_with_that_share_at_or_below(
    ordered: list[int], percent: int
) -> None:
    def share(value: int) -> Fraction:
        return Fraction(sum(other <= value for other in ordered), len(ordered))

    wanted = min(value for value in ordered if share(value) >= Fraction(percent, 100))
    assert nearest_rank(ordered, percent / 100) == wanted
    assert percentiles(reversed(ordered), percent) == {f"p{percent}": wanted}
    assert nearest_bin(Counter(ordered), percent / 100, len(ordered)) == wanted


@given(VALUES, st.sampled_from((0.0, 0.25, 0.5, 0.75)))
def test_the_rank_above_has_more_than_that_share(ordered: list[int], share: float) -> None:
    value = ordered[rank_above(share, len(ordered))]
    assert sum(other <= value for other in ordered) > share * len(ordered)
    assert sum(other < value for other in ordered) <= share * len(ordered)


def test_no_rank_is_above_all() -> None:
    assert rank_above(1.0, 4) == 3


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=60).map(sorted), st.integers(1, 99))
def test_interpolation_is_that_of_the_standard_library(ordered: list[float], percent: int) -> None:
    cuts = quantiles(ordered, n=100, method="inclusive")
    assert interpolated(ordered, percent / 100) == pytest.approx(cuts[percent - 1])
    assert interpolated(ordered, 1.0) == ordered[-1]


def test_percentiles_of_nothing_are_zero() -> None:
    assert percentiles([], 50, 99) == {"p50": 0.0, "p99": 0.0}


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60).map(sorted), PERCENTS)
def test_the_histogram_gives_the_nearest_rank_to_half_a_bin(
    ordered: list[float], percent: int
) -> None:
    histogram = Histogram()
    for value in ordered:
        histogram.add(value)
    exact = nearest_rank(ordered, percent / 100)
    assert histogram.quantile(percent / 100) == pytest.approx(exact, rel=(GROWTH - 1) * 0.51)
    assert histogram.quantile(1.0) <= histogram.largest == ordered[-1]


def test_a_histogram_without_values_has_quantiles_of_zero() -> None:
    assert Histogram().quantile(0.9) == 0.0
