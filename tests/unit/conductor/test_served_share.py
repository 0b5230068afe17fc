"""Tests the share of recent requests that two pools can serve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.roles.served_share import Needs, RecentRequest, RecentRequests
from tests.unit.conductor.conductor_instances import info

shares = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30)
loads = st.floats(0.0, 8.0)


def needs_of(prefill: list[float], decode: list[float]) -> Needs:
    first, second = np.array(prefill), np.array(decode)
    return Needs(first / first.sum(), second / second.sum())


@given(shares, loads, loads)
def test_the_load_is_the_worst_one_without_overload_and_never_more(
    prefill: list[float], first: float, second: float
) -> None:
    load = needs_of(prefill, prefill[::-1]).load(first, second)
    worst = max(first, second)
    assert load == worst if worst <= 1.0 else 1.0 - 1e-9 <= load <= worst + 1e-9


@given(shares, loads, loads, st.floats(0.0, 1.0))
def test_more_load_never_serves_more(
    prefill: list[float], first: float, second: float, less: float
) -> None:
    """Both loads shrink by the same factor, because with another ratio the best order could
    differ."""
    needs = needs_of(prefill, prefill[::-1])
    assert needs.load(first * less, second * less) <= needs.load(first, second) + 1e-9


def test_a_few_long_prompts_make_the_load_but_not_the_number() -> None:
    """Nine of ten requests need a tenth of the prefill, so twice the prefill capacity serves no
    more requests."""
    needs = needs_of([0.1 / 9] * 9 + [0.9], [0.1] * 10)
    assert needs.load(4.0, 0.5) == pytest.approx(10 / (9 + 0.55 / 3.55))
    assert needs.load(2.0, 1.0) == pytest.approx(10 / (9 + 0.1 / 1.1))


def test_without_requests_the_load_counts() -> None:
    assert Needs(np.zeros(0), np.zeros(0)).load(3.0, 2.0) == 3.0


def test_needs_follow_the_instances_costs() -> None:
    table = InstanceTable()
    table.join(0, info("m0"))
    recent = RecentRequests()
    recent.add(RecentRequest(1.0, 5, 5, 10.0, 0))  # a request from before the mix changed
    recent.add(RecentRequest(2.0, 100, 0, 50.0, 0))
    recent.add(RecentRequest(3.0, 300, 100, 10.0, 0))
    needs = recent.needs(table, 2.0, lambda kind: 20.0)
    assert needs.prefill == pytest.approx([0.25, 0.75])
    # The first has 20 tokens of 10 ms each and 1 us per token of context; the limit of 10 holds for
    # the other.
    one, other = 20 * (0.01 + 110e-6), 10 * (0.01 + 405e-6)
    assert needs.decode == pytest.approx([one / (one + other), other / (one + other)])
