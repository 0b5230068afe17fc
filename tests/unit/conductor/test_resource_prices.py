"""Prices of prefill and decode under overload."""

from __future__ import annotations

from random import Random

from moonpool.conductor.resource_prices import (
    MIN_ARRIVALS,
    ClusterCapacity,
    RequestNeed,
    ResourcePrices,
)

CAPACITY = ClusterCapacity(
    num_prefills=2,
    queue_s=24.0,  # as long as it should be
    wait_s=24.0,
    slo_ttft_s=30.0,
    decode_load_s=0.1,
    decode_used_s=0.1,
    lifetime_s=10.0,
)
FREE = 1e-9


def admitted(needs: list[RequestNeed], capacity: ClusterCapacity = CAPACITY) -> list[RequestNeed]:
    """The second half of these arrivals, so far as they are worth their cost."""
    prices, accepted = ResourcePrices(), []
    for index, need in enumerate(needs):
        prices.note_arrival(need)
        prefill, decode = prices.cost(need, capacity, need.at_s)
        if 2 * index >= len(needs) and need.worth >= prefill + decode:
            accepted.append(need)
    return accepted


def arrivals(rate: float, prefill_s: float, decode_s: float = FREE) -> list[RequestNeed]:
    """100 s with needs from half to one and a half of these, in means."""
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
    needs = arrivals(rate=8.0, prefill_s=1.0)  # four times what two instances do
    accepted = admitted(needs)
    assert 80.0 < sum(need.prefill_s for need in accepted) < 120.0, "2 instances for 50 s"
    assert max(need.prefill_s for need in accepted) < 0.9 < 1.3
    assert len(accepted) > 130, "more than of average need"


def test_under_overload_the_cheap_fill_the_decode_instances() -> None:
    needs = arrivals(rate=20.0, prefill_s=FREE, decode_s=0.002)
    load = sum(need.decode_s for need in admitted(needs)) * 10.0 / 50.0
    assert 0.08 < load < 0.12


def test_one_price_does_not_hide_behind_the_other() -> None:
    """Both resources are short: what is admitted uses up one of them."""
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
