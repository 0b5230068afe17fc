"""Tests the search for a capacity, on measures whose capacity is known."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.plan.confidence import Attainment, Verdict
from moonpool_lab.profiling.capacity import CapacityGoal, Measure, one_by_one, search_capacity

NUM_REQUESTS = 20_000


def noisy_step(edge: float, width: float, noise: float) -> Measure:
    """Returns a measure that is 1 up to `edge`, 0 from (1 + width) times `edge` on, and linear
    between."""

    def measure(rate: float, seed: int) -> Attainment:
        share = 1.0 - min(max((rate / edge - 1.0) / width, 0.0), 1.0)
        share += noise * (2.0 * Random(f"{rate} {seed}").random() - 1.0)
        return Attainment(NUM_REQUESTS, round(NUM_REQUESTS * min(max(share, 0.0), 1.0)))

    return one_by_one(measure)


@settings(max_examples=60, deadline=None)
@given(
    edge=st.floats(0.02, 50),
    width=st.floats(0.01, 0.5),
    start=st.floats(0.1, 10),
    tolerance=st.floats(0.01, 0.2),
)
def test_without_noise_the_edge_is_found(
    edge: float, width: float, start: float, tolerance: float
) -> None:
    wanted = 0.9
    goal = CapacityGoal(wanted=wanted, tolerance=tolerance, max_runs=1000)
    found = search_capacity(noisy_step(edge, width, 0.0), start, goal)
    true = edge * (1 + (1 - wanted) * width)
    assert found.ended == "found"
    assert found.holds <= true * 1.001 and found.fails >= true * 0.999
    assert found.unclear or found.fails <= found.holds * (1 + tolerance) * 1.001
    assert found.estimate is not None and found.holds <= found.estimate <= found.fails
    assert found.num_runs == sum(len(point.runs) for point in found.points)


@settings(max_examples=60, deadline=None)
@given(edge=st.floats(0.1, 50), noise=st.floats(0.0, 0.05), start=st.floats(0.2, 5))
def test_with_noise_nothing_clearly_wrong_is_claimed(
    edge: float, noise: float, start: float
) -> None:
    """Every verdict far outside of the noise must be right, and undecided rates must be near the
    edge."""
    goal = CapacityGoal(tolerance=0.05, confidence=0.99, max_runs=1000)
    found = search_capacity(noisy_step(edge, 0.3, noise), start, goal)
    true = edge * 1.03
    reach = 1 + 0.3 * noise * 1.5 + 0.01
    assert found.holds <= true * reach and found.fails >= true / reach
    for point in found.unclear:
        assert true / reach / 1.06 <= point.rate <= true * reach * 1.06


def test_every_run_is_asked_for_once_and_seeds_go_up_from_the_first() -> None:
    asked: list[tuple[float, int]] = []
    inner = noisy_step(3.0, 0.5, 0.05)

    def measure(points: Sequence[tuple[float, int]]) -> Sequence[Attainment]:
        asked.extend(points)
        return inner(points)

    found = search_capacity(measure, 1.0, CapacityGoal(first_seed=7, max_seeds=5))
    assert len(asked) == len(set(asked)) == found.num_runs
    for point in found.points:
        seeds = [seed for rate, seed in asked if rate == point.rate]
        assert seeds == list(range(7, 7 + len(seeds))) and 2 <= len(seeds) <= 5


def test_more_seeds_go_to_where_it_is_not_clear() -> None:
    found = search_capacity(
        noisy_step(3.0, 1.0, 0.1), 1.0, CapacityGoal(max_seeds=8, tolerance=0.1)
    )
    seeds = {point.rate: len(point.runs) for point in found.points}
    assert max(seeds.values()) > 2
    assert all(len(p.runs) == 8 for p in found.unclear)


def test_a_spent_budget_says_so_and_keeps_what_is_known() -> None:
    found = search_capacity(
        noisy_step(3.0, 0.1, 0.0), 1.0, CapacityGoal(max_runs=5, tolerance=0.001)
    )
    assert found.ended == "runs used up" and found.num_runs == 5
    assert found.holds == 2.0


def test_no_end_is_no_capacity() -> None:
    always = one_by_one(lambda rate, seed: Attainment(100, 100))
    found = search_capacity(always, 1.0, CapacityGoal())
    assert found.ended == "no rate fails" and found.fails == float("inf") and found.holds > 100
    never = one_by_one(lambda rate, seed: Attainment(100, 0))
    found = search_capacity(never, 1.0, CapacityGoal())
    assert found.ended == "no rate holds" and found.holds == 0.0
    assert all(point.verdict is Verdict.MISSES for point in found.points)
