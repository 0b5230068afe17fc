"""Sums over instances, and the loads made of them."""

from __future__ import annotations

import msgspec
import pytest
from conductor_instances import COST, info

from moonpool.conductor.fleet import Fleet
from moonpool.types import Slo

SLO = Slo(ttft_s=10.0, tbt_s=0.1)


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    for row, name in enumerate(names):
        fleet.join(row, info(name))
    return fleet


def test_room_is_the_pools_and_load_the_engines() -> None:
    """What the engine has no room for waits in the pool; that it would have to wait is load."""
    fleet = Fleet()
    fleet.join(0, info("d0", num_blocks=1000))
    fleet.join(1, info("d1", num_blocks=1000, engine_tokens=300))
    assert list(fleet.room_tokens) == [1000, 1000]
    fleet.begin_decoding(1, 270)
    step = COST.decode_step_s(1, 270) / SLO.tbt_s
    assert step < 0.9
    assert fleet.decode_load(SLO) == pytest.approx(0.9 / 2)
    fleet.end_decoding(1, 270)
    fleet.begin_decoding(0, 270)
    assert fleet.decode_load(SLO) == pytest.approx(step / 2)


def test_queues_shrink_as_time_passes_but_never_below_what_waits() -> None:
    fleet = fleet_of("p0", "p1")
    fleet.busy_until_s[0], fleet.waiting_ns[0] = 5.0, 2_000_000_000
    assert list(fleet.queue_s(3.0)) == [4.0, 0.0]
    assert list(fleet.queue_s(9.0)) == [2.0, 0.0]


def test_predictions_are_those_of_the_cost_model() -> None:
    fleet = fleet_of("p0", "d0")
    fleet.book_decode(1, 500)
    fleet.book_decode(1, 700)
    assert fleet.booked_tbt_s(300)[1] == pytest.approx(COST.decode_step_s(3, 1500))
    cached = fleet.host * 0 + 40
    assert fleet.prefill_s(100, cached)[0] == pytest.approx(COST.prefill_s(100, 40))


def test_prefill_load_is_the_mean_wait() -> None:
    fleet = fleet_of("p0", "p1", "d0")
    fleet.waiting_ns[0], fleet.waiting_ns[2] = 3_000_000_000, 9_000_000_000
    assert fleet.prefill_load(SLO, 0.0) == pytest.approx(0.15)
    assert fleet_of("d0").prefill_load(SLO, 0.0) == 0.0


def test_decode_load_is_the_mean_step() -> None:
    fleet = fleet_of("d0", "d1", "p0")
    for _ in range(6):
        fleet.begin_decoding(0, 1000)
    assert fleet.decode_load(SLO) == pytest.approx((0.06 + 0.006) / 0.1 / 2)
    assert fleet.spread_decode_load(SLO, 6, 6000) == pytest.approx((0.03 + 0.003) / 0.1)
    for _ in range(6):
        fleet.end_decoding(0, 1000)
    assert fleet.decode_load(SLO) == 0.0, "an idle instance takes no steps"


def test_an_instance_takes_what_is_booked_with_it() -> None:
    fleet = fleet_of("d0", "d1")
    fleet.begin_decoding(0, 100)
    fleet.begin_decoding(1, 10)
    fleet.leave(0)
    assert (fleet.total_decoding, fleet.total_decoding_context) == (1, 10)
    assert fleet.num_decodes == 1 and fleet.room_tokens[0] == 0
    fleet.join(0, info("p0"))
    assert (fleet.num_prefills, fleet.decoding_batch[0]) == (1, 0)


def test_answers_are_spread_so_that_all_are_equally_slow() -> None:
    """One takes twice as long for an answer, and one whose bare step is too slow takes none."""
    fleet = Fleet()
    for row, decode in enumerate([(0.01, 0.01, 0.0), (0.01, 0.02, 0.0), (0.5, 0.01, 0.0)]):
        fleet.join(row, info(f"d{row}", cost=msgspec.structs.replace(COST, decode=decode)))
    assert not fleet.decodes_alike
    # 20 answers and 10: steps of 0.21 s on both.
    assert fleet.level_tbt_s(30, 3000) == pytest.approx(0.21)
    # So many that the third helps: (t - .01) / .01 + (t - .01) / .02 + (t - .5) / .01 = 100.
    assert fleet.level_tbt_s(100, 0) == pytest.approx((100 + 1.5 + 50) / 250)
    assert fleet.level_tbt_s(0, 0) == pytest.approx(0.01)
    fleet.believe(1, msgspec.structs.replace(COST, decode=(0.01, 0.01, 0.0)))
    assert not fleet.decodes_alike
    fleet.leave(2)
    assert fleet.decodes_alike
