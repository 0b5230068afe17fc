"""Tests prices of prefill and decode under overload."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.admission.resource_prices import (
    MAX_ARRIVALS,
    MIN_ARRIVALS,
    ClusterCapacity,
    RecentArrivals,
    RequestNeed,
    ResourcePrices,
)

CAPACITY = ClusterCapacity(
    num_prefills=2,
    queue_s=24.0,  # the queue is as long as it should be
    wait_s=24.0,
    slo_ttft_s=30.0,
    decode_load_s=0.1,
    decode_used_s=0.1,
    lifetime_s=10.0,
)
FREE = 1e-9


def admitted(needs: list[RequestNeed], capacity: ClusterCapacity = CAPACITY) -> list[RequestNeed]:
    """Plays these arrivals, of which each is admitted if it is worth its cost. Counts those of the
    second half that are admitted."""
    prices, accepted = ResourcePrices(), []
    for index, need in enumerate(needs):
        prices.note_arrival(need)
        prefill, decode = prices.cost(need, capacity, need.at_s)
        if 2 * index >= len(needs) and need.worth >= prefill + decode:
            accepted.append(need)
    return accepted


def arrivals(rate: float, prefill_s: float, decode_s: float = FREE) -> list[RequestNeed]:
    """Returns 100 s of arrivals, whose needs have these means and are 0.5 to 1.5 times the mean."""
    random = Random(7)
    return [
        RequestNeed(
            i / rate, 1.0, prefill_s * random.uniform(0.5, 1.5), decode_s * random.uniform(0.5, 1.5)
        )
        for i in range(int(100 * rate))
    ]


def test_without_overload_nothing_is_rejected() -> None:
    needs = arrivals(rate=4.0, prefill_s=0.45, decode_s=0.002)
    assert len(admitted(needs)) == len(needs) // 2


def test_under_overload_the_cheap_fill_the_prefill_instances() -> None:
    needs = arrivals(rate=8.0, prefill_s=1.0)  # four times the work that two instances can do
    accepted = admitted(needs)
    assert 80.0 < sum(need.prefill_s for need in accepted) < 120.0, "2 instances for 50 s"
    assert max(need.prefill_s for need in accepted) < 0.9 < 1.3
    assert len(accepted) > 130, "more than of average need"


def test_under_overload_the_cheap_fill_the_decode_instances() -> None:
    needs = arrivals(rate=20.0, prefill_s=FREE, decode_s=0.002)
    load = sum(need.decode_s for need in admitted(needs)) * 10.0 / 50.0
    assert 0.08 < load < 0.12


def test_one_price_does_not_hide_behind_the_other() -> None:
    """If both resources are short, the admitted requests must use up one of them."""
    needs = arrivals(rate=8.0, prefill_s=1.0, decode_s=0.005)
    accepted = admitted(needs)
    prefill = sum(need.prefill_s for need in accepted) / 100.0
    decode = sum(need.decode_s for need in accepted) * 10.0 / 50.0 / 0.1
    assert 0.7 < max(prefill, decode) < 1.3


def test_a_longer_queue_raises_the_price() -> None:
    needs = arrivals(rate=3.0, prefill_s=0.6)
    short = admitted(needs, CAPACITY._replace(queue_s=0.0))
    long = admitted(needs, CAPACITY._replace(queue_s=29.0))
    assert len(short) == len(needs) // 2 > 1.4 * len(long)


def test_a_few_arrivals_have_no_price() -> None:
    needs = [RequestNeed(0.001 * i, 1.0, 100.0, 1.0) for i in range(MIN_ARRIVALS - 1)]
    prices = ResourcePrices()
    for need in needs:
        prices.note_arrival(need)
        assert prices.cost(need, CAPACITY, need.at_s) == (0.0, 0.0)


def test_old_arrivals_are_forgotten() -> None:
    prices = ResourcePrices()
    for need in arrivals(rate=8.0, prefill_s=2.0):
        prices.note_arrival(need)
        prices.cost(need, CAPACITY, need.at_s)
    assert prices.prices[0] > 0.0
    late = RequestNeed(1000.0, 1.0, 2.0, FREE)
    prices.note_arrival(late)
    assert prices.cost(late, CAPACITY, 1000.0) == (0.0, 0.0)


def delay(num_prefills: int, prefill_s: float, begin_s: float = 0.0, alone_s: float = 1.0) -> float:
    """Returns the delay with 60 arrivals, one a second, that are worth 1 and compute `alone_s`
    within 3 s."""
    capacity = CAPACITY._replace(num_prefills=num_prefills, queue_s=0.0, slo_ttft_s=3.0)
    prices = ResourcePrices()
    for second in range(61):
        prices.note_arrival(RequestNeed(float(second), 1.0, FREE, FREE, alone_s))
        prices.cost(RequestNeed(60.0, 1.0, FREE, FREE, alone_s), capacity, float(second))
    return prices.delay(begin_s, prefill_s, num_prefills, 3.0)


def test_a_long_prefill_delays_those_who_come_meanwhile() -> None:
    # A request that arrives in the first 3 of the 5 s waits for more than 2 s, and takes 1 s to
    # compute, so it is late.
    assert delay(1, 5.0) == pytest.approx(3.0, rel=0.05)
    assert delay(1, 2.0) == 0.0
    assert delay(1, 2.0, begin_s=1.5) == pytest.approx(1.5, rel=0.05), "behind a queue"
    assert delay(1, 5.0, alone_s=0.5) == pytest.approx(2.5, rel=0.05), "they need less"


def test_other_instances_take_most_of_those_who_come_meanwhile() -> None:
    # The other instance is busy half of the time. In the other half, each of the two is equally
    # likely to be free first.
    assert delay(2, 5.0) == pytest.approx(3.0 * 0.5 / 2, rel=0.05)
    assert delay(8, 5.0) < 0.001


def test_no_more_are_delayed_than_could_be_served() -> None:
    assert delay(1, 5.0, alone_s=2.0) == pytest.approx(4.0 / 2, rel=0.05), "twice the capacity"


def test_nobody_is_delayed_where_few_come() -> None:
    assert ResourcePrices().delay(0.0, 5.0, 1, 3.0) == 0.0


def test_decode_instances_that_compute_prompts_add_to_the_capacity() -> None:
    """If decode instances do a third of the prompts' work, prefill instances can serve half as much
    again."""
    needs = arrivals(rate=6.0, prefill_s=1.0)

    def price(on_decode: bool) -> float:
        prices = ResourcePrices()
        for index, need in enumerate(needs):
            prices.note_arrival(need)
            prices.note_placed(need.prefill_s, on_decode and index % 3 == 0, need.at_s)
        return prices.cost(needs[-1], CAPACITY, needs[-1].at_s)[0] / needs[-1].prefill_s

    helped, alone = price(True), price(False)
    more = CAPACITY._replace(num_prefills=3)
    prices = ResourcePrices()
    for need in needs:
        prices.note_arrival(need)
    expected = prices.cost(needs[-1], more, needs[-1].at_s)[0] / needs[-1].prefill_s
    assert helped < alone
    assert helped == pytest.approx(expected, rel=0.05)


@given(
    st.lists(st.tuples(st.integers(1, MAX_ARRIVALS), st.floats(0.0, 2.0)), min_size=1, max_size=12)
)
def test_recent_rows_are_the_last_ones_and_stay(
    steps: list[tuple[int, float]],
) -> None:
    recent, expected, now = RecentArrivals(2), [], 0.0
    for num_rows, window in steps:
        taken = recent.columns
        before = taken.copy()
        for _ in range(num_rows):
            now += 1.0
            recent.add(now, -now)
            expected = [*expected, now][-MAX_ARRIVALS:]
        assert (taken == before).all(), "who has the columns keeps them"
        recent.drop_before(now - window * MAX_ARRIVALS)
        expected = [at for at in expected if at >= now - window * MAX_ARRIVALS]
        assert recent.columns[0].tolist() == expected
        assert recent.columns[1].tolist() == [-at for at in expected]
        assert len(recent) == len(expected)


def test_a_new_update_gives_the_same_prices_as_a_new_window() -> None:
    """Arrivals outside the window that are still in the arrays must not change the prices."""
    needs = arrivals(rate=12.0, prefill_s=1.0, decode_s=0.01)
    old = ResourcePrices()
    for need in needs:
        old.note_arrival(need)
        old.cost(need, CAPACITY, need.at_s)
    last_s = needs[-1].at_s
    new = ResourcePrices()
    for need in needs[-MAX_ARRIVALS:]:
        new.note_arrival(need)
    new.cost(needs[-1], CAPACITY, last_s + 1.0)
    old.cost(needs[-1], CAPACITY, last_s + 1.0)
    new._decode = old._decode = 0.0
    new._prefill = old._prefill = 0.0
    new.cost(needs[-1], CAPACITY, last_s + 2.0)
    old.cost(needs[-1], CAPACITY, last_s + 2.0)
    assert old.prices == new.prices and old.prices[0] > 0.0
