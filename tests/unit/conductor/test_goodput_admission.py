"""Tests admission by goodput: the required chance to meet the TTFT SLO includes the wait, and
prices follow the pools."""

from __future__ import annotations

import msgspec
import numpy as np
from conductor_instances import COST, info

from moonpool.conductor.admission.context import (
    LEAST_TTFT_CHANCE_ALONE,
    AdmissionContext,
    ExpectedGoodput,
    SloBudget,
)
from moonpool.conductor.admission.goodput import GoodputModel, decide
from moonpool.conductor.admission.resource_prices import (
    ClusterCapacity,
    RequestNeed,
    ResourcePrices,
)
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.decode_forecast import IntervalForecast
from moonpool.conductor.placement.choice import Placement, Rejection, place
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import scaled
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.types import Slo

NAMES = ("p0", "d0")
SHORT = RequestFootprint(
    number=1,
    num_tokens=200,  # takes 0.2 s of prefill
    expected_tokens=1000,
    decodes=True,
    block_tokens=1,
    token_bytes=1,
    answer_s=20.0,
)
COMMON = msgspec.structs.replace(SHORT, num_tokens=1000)
LONG = msgspec.structs.replace(SHORT, num_tokens=20_000, expected_tokens=20_000)


class SeenPrices(ResourcePrices):
    """Remembers the pools of the last call."""

    seen: ClusterCapacity | None = None

    def cost(self, need: RequestNeed, capacity: ClusterCapacity, now: float) -> tuple[float, float]:
        self.seen = capacity
        return super().cost(need, capacity, now)


def adds_more(ttft_chance: float, waiting_share: float, prefill_cost: float = 0.0) -> bool:
    return ExpectedGoodput(
        worth=ttft_chance,
        ttft_chance=ttft_chance,
        tbt_chance=1.0,
        harm=0.0,
        prefill_cost=prefill_cost,
        decode_cost=0.0,
        step_s=0.03,
        waiting_share=waiting_share,
    ).adds_more


def test_an_idle_instance_takes_a_doubtful_prompt_but_a_queue_does_not() -> None:
    """At an idle instance, no other request could use the time that the prompt takes."""
    doubtful = LEAST_TTFT_CHANCE_ALONE - 0.3
    assert adds_more(doubtful, waiting_share=0.0)
    assert not adds_more(doubtful, waiting_share=1.0)
    assert adds_more(LEAST_TTFT_CHANCE_ALONE, waiting_share=1.0)
    assert not adds_more(doubtful, waiting_share=0.0, prefill_cost=1.0), "others would get it"
    assert not adds_more(0.001, waiting_share=0.0), "it is all but hopeless"


def expected(num_others: int) -> ExpectedGoodput:
    """Decides on a prompt of 3.06 s under a TTFT SLO of 3 s, at an idle instance where another
    prompt arrived every 2 s."""
    cluster_state = ClusterState(IntervalForecast())
    for name in NAMES:
        cluster_state.join(info(name, num_blocks=100_000))
    table, config = cluster_state.instance_table, ConductorConfig(admission="goodput")
    model, none = GoodputModel(table), np.zeros(len(NAMES))
    budget, found = SloBudget(Slo(ttft_s=3.0, tbt_s=0.1), 0.0), None
    doubtful = msgspec.structs.replace(SHORT, num_tokens=3025, expected_tokens=3100)
    for number, footprint in enumerate((*[COMMON] * num_others, doubtful)):
        now = 2.0 * number
        placement = place(footprint, table, PrefixMatch(none, none, 0), config, now)
        assert isinstance(placement, Placement)
        forecast = cluster_state.forecast
        context = AdmissionContext(footprint, placement, budget, table, forecast, config, now)
        found = model.expect(context, model.decode.load(context), (), first=True)
    assert found is not None
    return found


def test_a_doubtful_prompt_is_rejected_where_others_would_wait_for_it() -> None:
    """The chance is the same in both cases; at an idle instance, the required chance does not
    apply."""
    alone, among_others = expected(0), expected(40)
    assert 0.02 < alone.ttft_chance == among_others.ttft_chance < 0.5
    assert alone.adds_more and not alone.delay
    assert among_others.delay > among_others.gain and not among_others.adds_more
    assert among_others.prefill_cost == 0.0, "there is no overload"


def decided(num_tokens: int, num_others: int = 0, queue_s: float = 0.0) -> Rejection | None:
    """Decides on a prompt under a TTFT SLO of 3 s, at an idle instance whose recent prompts took
    twice as long as those measured at rest. Another prompt arrived every 2 s."""
    cluster_state = ClusterState(IntervalForecast())
    for name in NAMES:
        cluster_state.join(info(name, num_blocks=100_000))
    table, config = cluster_state.instance_table, ConductorConfig(admission="goodput")
    table.set_cost(0, scaled(COST, 2.0, 1.0), 2.0)
    table.waiting_ns[0] = queue_s * 1e9
    model, none = GoodputModel(table), np.zeros(len(NAMES))
    budget, context = SloBudget(Slo(ttft_s=3.0, tbt_s=0.1), 0.0), None
    own = msgspec.structs.replace(SHORT, num_tokens=num_tokens, expected_tokens=num_tokens + 100)
    for number, footprint in enumerate((*[COMMON] * num_others, own)):
        now = 2.0 * number
        placement = place(footprint, table, PrefixMatch(none, none, 0), config, now)
        assert isinstance(placement, Placement)
        forecast = cluster_state.forecast
        context = AdmissionContext(footprint, placement, budget, table, forecast, config, now)
        found = model.expect(context, model.decode.load(context), (), first=True)
    assert context is not None
    return decide(context, found)


def test_what_is_in_time_at_rest_is_tried_where_a_rejection_would_free_nothing() -> None:
    """The peers of `moonpool bench routers` served such prompts in time."""
    assert decided(2000) is None, "4 s are predicted, 2 s were measured"
    for found in (decided(2000, num_others=40), decided(2000, queue_s=10.0)):
        assert found is not None and found.status == 429
        assert 1.0 <= found.retry_after_s < 60.0 and "idle" not in found.message
    hopeless = decided(4000)
    assert hopeless is not None and hopeless.status == 422
    assert "also on an idle instance" in hopeless.message


def test_a_prompt_that_waits_for_itself_does_not_make_the_pools_look_full() -> None:
    cluster_state = ClusterState(IntervalForecast())
    for name in NAMES:
        cluster_state.join(info(name, num_blocks=100_000))
    table, config = cluster_state.instance_table, ConductorConfig(admission="goodput")
    model, none = GoodputModel(table), np.zeros(len(NAMES))
    model.prices = prices = SeenPrices()
    waits_s = []
    for footprint in (*[SHORT] * 20, LONG):
        placement = place(footprint, table, PrefixMatch(none, none, 0), config, 0.0)
        assert isinstance(placement, Placement)
        budget = SloBudget(Slo(ttft_s=3.0, tbt_s=0.1), 0.0)
        context = AdmissionContext(
            footprint, placement, budget, table, cluster_state.forecast, config, 0.0
        )
        model.expect(context, model.decode.load(context), (), first=True)
        assert prices.seen is not None
        waits_s.append(prices.seen.wait_s)
    assert waits_s[-1] == waits_s[-2] < 0.5, "the long one takes 20 s"
