"""Tests the four admission policies, on loads that the tests set."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from conductor_instances import COST, info

from moonpool.conductor.admission.context import AdmissionContext, SloBudget
from moonpool.conductor.admission.policies import admit
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.decode_forecast import IntervalForecast
from moonpool.conductor.placement.choice import Placement, Rejection, place
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import scaled
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.types import Slo

NAMES = ("p0", "d0", "d1")
DEMAND = RequestFootprint(
    number=1,
    num_tokens=1000,  # takes 1 s of prefill
    expected_tokens=1000,  # makes a step 1 ms longer, in addition to 10 ms per answer
    decodes=True,
    block_tokens=1,
    token_bytes=1,
    answer_s=20.0,
)


class Scene:
    """Makes one prefill and two decode instances."""

    def __init__(self, queue_s: float = 0.0, decoding: tuple[int, int] = (0, 0)) -> None:
        self.cluster_state = ClusterState(IntervalForecast())
        for name in NAMES:
            self.cluster_state.join(info(name, num_blocks=100_000))
        self.cluster_state.instance_table.waiting_ns[0] = queue_s * 1e9
        for row, count in enumerate(decoding, start=1):
            for _ in range(count):
                self.cluster_state.instance_table.begin_decoding(row, 0)

    def enter(self, count: int, begins_s: float, lasts_s: float) -> None:
        for _ in range(count):
            self.cluster_state.forecast.enter(begins_s, lasts_s, 0, 0.0)

    def decide(
        self,
        admission: Any,
        ttft_s: float = 30.0,
        tbt_s: float = 1.0,
        waited_s: float = 0.0,
        footprint: RequestFootprint = DEMAND,
        **config: Any,
    ) -> Rejection | None:
        settings = ConductorConfig(admission=admission, **config)
        none = np.zeros(len(NAMES))
        table = self.cluster_state.instance_table
        placement = place(footprint, table, PrefixMatch(none, none, 0), settings, 0.0)
        assert isinstance(placement, Placement)
        budget = SloBudget(Slo(ttft_s=ttft_s, tbt_s=tbt_s), waited_s)
        forecast = self.cluster_state.forecast
        return admit(AdmissionContext(footprint, placement, budget, table, forecast, settings, 0.0))

    def refuse(self, admission: Any, *, status: int = 429, **known: Any) -> Rejection:
        refusal = self.decide(admission, **known)
        assert refusal is not None
        assert refusal.status == status
        assert (refusal.retry_after_s < float("inf")) == (status == 429)
        return refusal


def test_none_rejects_nothing() -> None:
    context = Scene(queue_s=100.0, decoding=(50, 50))
    assert context.decide("none", ttft_s=0.001, tbt_s=0.001) is None


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive"])
def test_a_late_request_is_rejected_with_the_time_to_retry(admission: str) -> None:
    refusal = Scene(queue_s=4.0).refuse(admission, ttft_s=2.0)
    assert refusal.reason == "ttft_slo"
    assert refusal.retry_after_s == pytest.approx(4.0 + 1.0 - 2.0)
    assert "5.00 s exceeds the SLO of 2 s" in refusal.message and "idle" not in refusal.message
    assert Scene(queue_s=1.0).decide(admission, ttft_s=2.0) is None, "exactly the SLO is met"


def test_a_prompt_too_long_for_any_instance_is_named() -> None:
    refusal = Scene(queue_s=4.0).refuse("early", status=422, ttft_s=0.5)
    assert refusal.reason == "ttft_slo" and "shorten the prompt" in refusal.message


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive"])
def test_what_is_slow_only_now_may_come_again(admission: str) -> None:
    """Only costs that were measured at rest justify the refusal that not even an idle instance
    would be in time."""
    slow = Scene()
    slow.cluster_state.instance_table.set_cost(0, scaled(COST, 2.0, 1.0), 2.0)
    refusal = slow.refuse(admission, ttft_s=1.5)  # the prediction is 2 s, the measurement was 1 s
    assert refusal.reason == "ttft_slo" and "idle" not in refusal.message
    slow.refuse(admission, status=422, ttft_s=0.9)


def test_time_already_spent_counts() -> None:
    context = Scene(queue_s=4.0)
    assert context.decide("early", ttft_s=8.0, waited_s=3.0) is None
    assert context.refuse("early", ttft_s=8.0, waited_s=3.1).reason == "ttft_slo"


def test_the_limit_is_of_load_not_of_latency() -> None:
    context = Scene(queue_s=1.0)  # predicts 2 s to the first token
    assert context.decide("baseline", ttft_s=4.0, load_limit=0.5) is None
    assert "0.4 of the SLO" in context.refuse("baseline", ttft_s=4.0, load_limit=0.4).message
    assert context.decide("baseline", ttft_s=1.0, load_limit=2.0) is None
    busy = Scene(decoding=(4, 4))  # predicts a step of 5 x 10 ms + 1 ms
    assert busy.decide("early", tbt_s=0.06) is None
    assert busy.refuse("early", tbt_s=0.06, load_limit=0.8).reason == "decode_load"


def test_the_tbt_slo_applies_to_the_longest_gaps() -> None:
    busy = Scene(decoding=(4, 4))  # predicts a step of 5 x 10 ms + 1 ms
    assert busy.decide("early", tbt_s=0.06) is None
    busy.cluster_state.instance_table.tbt_tail = 1.3
    refusal = busy.refuse("early", tbt_s=0.06)
    assert "0.066 s" in refusal.message
    assert busy.decide("early", tbt_s=0.07) is None


def test_queueing_is_corrected_by_the_recent_lateness() -> None:
    context = Scene(queue_s=4.0)
    assert context.decide("early", ttft_s=5.5) is None
    context.cluster_state.instance_table.ttft_tail = 1.2
    refusal = context.refuse("early", ttft_s=5.5)
    assert "5.00 s (5.80 s" in refusal.message and "SLO of 5.5 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(0.3)
    assert refusal.projection is not None
    assert refusal.projection["late_ttft_s"] == pytest.approx(5.8)
    idle = Scene()
    idle.cluster_state.instance_table.ttft_tail = 4.0
    assert idle.decide("early", ttft_s=1.0) is None, "whom nobody is before, it does not refuse"


def test_baseline_ignores_the_decode_load() -> None:
    assert Scene(decoding=(50, 50)).decide("baseline", tbt_s=0.02) is None


def test_early_uses_the_present_decode_load_only() -> None:
    context = Scene(decoding=(6, 2))  # with a mean of 4 answers and this answer, a step takes 51 ms
    assert context.decide("early", tbt_s=0.052) is None
    refusal = context.refuse("early", tbt_s=0.050)
    assert refusal.reason == "decode_load"
    assert "0.051 s with the 8 answers on 2 instances exceeds" in refusal.message
    assert 0 < refusal.retry_after_s < 20.0
    context = Scene()
    context.enter(50, begins_s=0.5, lasts_s=100.0)
    assert context.decide("early", tbt_s=0.050) is None, "they will all be there when it is"


def test_predictive_uses_the_decode_load_at_the_end_of_the_prefill() -> None:
    coming = Scene()
    coming.enter(8, begins_s=0.5, lasts_s=3.0)
    refusal = coming.refuse("predictive", tbt_s=0.050)
    assert refusal.reason == "decode_load_predicted"
    assert "0.051 s with the 8 answers on 2 instances exceeds the SLO" in refusal.message
    assert "projected to the end of this prefill in 1.00 s" in refusal.message
    assert refusal.retry_after_s == 4.0, "of 1, 2, 4 s the first by which they are over"
    assert coming.decide("predictive", tbt_s=0.052) is None
    later = Scene()
    later.enter(8, begins_s=1.5, lasts_s=3.0)
    assert later.decide("predictive", tbt_s=0.050) is None, "this one begins before them"
    leaving = Scene(decoding=(50, 50))
    leaving.enter(100, begins_s=0.0, lasts_s=0.75)
    assert leaving.decide("predictive", tbt_s=0.050) is None, "they are over by then"
    assert leaving.refuse("early", tbt_s=0.050).reason == "decode_load"


@pytest.mark.parametrize("admission", ["early", "predictive"])
def test_an_impossible_slo_is_named(admission: str) -> None:
    refusal = Scene().refuse(admission, status=422, tbt_s=0.010)
    assert "even on an idle instance: raise the SLO" in refusal.message


@pytest.mark.parametrize("admission", ["early", "predictive"])
def test_one_token_has_no_decode(admission: str) -> None:
    single = RequestFootprint(
        number=1,
        num_tokens=1000,
        expected_tokens=1000,
        decodes=False,
        block_tokens=1,
        token_bytes=1,
        answer_s=20.0,
    )
    assert Scene(decoding=(50, 50)).decide(admission, tbt_s=0.001, footprint=single) is None


def test_an_engine_that_would_be_full_is_a_load_too() -> None:
    context = Scene(decoding=(6, 2))
    table = context.cluster_state.instance_table
    table.grow(1, 3000, 0)
    assert context.decide("early", tbt_s=0.5) is None
    table.engine_tokens[:] = 1500 + DEMAND.expected_tokens
    assert context.decide("early", tbt_s=0.5) is None, "exactly full"
    table.engine_tokens[:] -= 1
    refusal = context.refuse("early", tbt_s=0.5)
    assert refusal.reason == "decode_load" and "100% of the engine's memory" in refusal.message


def test_a_rejection_has_the_numbers_behind_it() -> None:
    late = Scene(queue_s=40.0).decide("predictive")
    assert late is not None and late.projection is not None
    assert late.projection["predicted_ttft_s"] == pytest.approx(41.0, rel=0.01)
    assert late.projection["limit_ttft_s"] == 30.0
    assert late.projection["predicted_queue_s"] == pytest.approx(40.0)

    slow = Scene(decoding=(200, 200)).decide("early", load_limit=0.5)
    assert slow is not None and slow.projection is not None
    assert slow.projection["predicted_tbt_s"] > slow.projection["limit_tbt_s"] == 0.5
    assert slow.projection["predicted_decode_load"] > slow.projection["limit_decode_load"]
    assert slow.projection["predicted_decoding"] == 400

    context = Scene()
    context.enter(400, 0.0, 1000.0)
    projected = context.decide("predictive")
    assert projected is not None and projected.projection is not None
    assert projected.projection["ahead_s"] == pytest.approx(1.0, rel=0.01)
    assert all(type(value) is float for value in projected.projection.values())


def test_a_slow_instance_does_not_stand_for_the_whole_pool() -> None:
    """The load of the slow instance alone must not count for the pool, because placement gives it
    few decodes."""
    context = Scene(decoding=(40, 5))
    slow = msgspec.structs.replace(COST, decode=(0.0, 0.08, 0.0))
    context.cluster_state.instance_table.set_cost(2, slow)
    # These are 45 answers: 40 on the fast instance and 5 on the slow one, both at 0.4 s a step.
    assert context.decide("early", tbt_s=0.6) is None
    refused = context.decide("early", tbt_s=0.35)
    assert refused is not None and refused.projection["predicted_tbt_s"] < 0.5
