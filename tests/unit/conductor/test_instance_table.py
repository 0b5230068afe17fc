"""Tests sums over instances, and the loads derived from the sums."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from conductor_instances import COST, info

from moonpool.conductor.instance_table import InstanceTable
from moonpool.types import Role, Slo

SLO = Slo(ttft_s=10.0, tbt_s=0.1)


def fleet_of(*names: str) -> InstanceTable:
    table = InstanceTable()
    for row, name in enumerate(names):
        table.join(row, info(name))
    return table


def test_room_is_of_the_pool_and_load_of_the_engine() -> None:
    """Requests that exceed the engine's memory wait in the pool, and count as load."""
    table = InstanceTable()
    table.join(0, info("d0", num_blocks=1000))
    table.join(1, info("d1", num_blocks=1000, engine_tokens=300))
    assert list(table.room_tokens) == [1000, 1000]
    table.begin_decoding(1, 270)
    step = COST.decode_step_s(1, 270) / SLO.tbt_s
    assert step < 0.9
    assert table.decode_load(SLO) == pytest.approx(0.9 / 2)
    table.end_decoding(1, 270)
    table.begin_decoding(0, 270)
    assert table.decode_load(SLO) == pytest.approx(step / 2)


def test_queues_shrink_as_time_passes_but_never_below_what_waits() -> None:
    table = fleet_of("p0", "p1")
    table.busy_until_s[0], table.waiting_ns[0] = 5.0, 2_000_000_000
    assert list(table.queue_s(3.0)) == [4.0, 0.0]
    assert list(table.queue_s(9.0)) == [2.0, 0.0]


def test_predictions_are_those_of_the_cost_model() -> None:
    table = fleet_of("p0", "d0")
    table.book_decode(1, 500)
    table.book_decode(1, 700)
    assert table.booked_tbt_s(300)[1] == pytest.approx(COST.decode_step_s(3, 1500))
    cached = table.host * 0 + 40
    assert table.prefill_s(100, cached)[0] == pytest.approx(COST.prefill_s(100, 40))


def test_prefill_load_is_the_mean_wait() -> None:
    table = fleet_of("p0", "p1", "d0")
    table.waiting_ns[0], table.waiting_ns[2] = 3_000_000_000, 9_000_000_000
    assert table.prefill_load(SLO, 0.0) == pytest.approx(0.15)
    assert fleet_of("d0").prefill_load(SLO, 0.0) == 0.0


def test_decode_load_is_the_mean_step() -> None:
    table = fleet_of("d0", "d1", "p0")
    for _ in range(6):
        table.begin_decoding(0, 1000)
    assert table.decode_load(SLO) == pytest.approx((0.06 + 0.006) / 0.1 / 2)
    assert table.spread_decode_load(SLO, 6, 6000) == pytest.approx((0.03 + 0.003) / 0.1)
    for _ in range(6):
        table.end_decoding(0, 1000)
    assert table.decode_load(SLO) == 0.0, "an idle instance takes no steps"


def test_a_leaving_instance_removes_its_bookings() -> None:
    table = fleet_of("d0", "d1")
    table.begin_decoding(0, 100)
    table.begin_decoding(1, 10)
    table.leave(0)
    assert (table.total_decoding, table.total_decoding_context) == (1, 10)
    assert table.num_decodes == 1 and table.room_tokens[0] == 0
    table.join(0, info("p0"))
    assert (table.num_prefills, table.decoding_batch[0]) == (1, 0)


def test_answers_are_spread_so_that_all_are_equally_slow() -> None:
    """A slower instance takes fewer decodes. An instance whose empty step is too slow takes
    none."""
    table = InstanceTable()
    for row, decode in enumerate([(0.01, 0.01, 0.0), (0.01, 0.02, 0.0), (0.5, 0.01, 0.0)]):
        table.join(row, info(f"d{row}", cost=msgspec.structs.replace(COST, decode=decode)))
    assert not table.decodes_alike
    # The answers are 20 and 10: steps take 0.21 s on both instances.
    assert table.level_tbt_s(30, 3000) == pytest.approx(0.21)
    # With this many answers, the third instance helps: (t - .01) / .01 + (t - .01) / .02 + (t - .5)
    # / .01 = 100.
    assert table.level_tbt_s(100, 0) == pytest.approx((100 + 1.5 + 50) / 250)
    assert table.level_tbt_s(0, 0) == pytest.approx(0.01)
    table.set_cost(1, msgspec.structs.replace(COST, decode=(0.01, 0.01, 0.0)))
    assert not table.decodes_alike
    table.leave(2)
    assert table.decodes_alike


def mixed_table(sizes_chunks: bool = True) -> InstanceTable:
    """Makes two idle mixed instances. A token of a prompt takes 0.1 ms and a step 20 ms more, in
    tiles of 128 tokens; decodes take 1 ms each."""
    cost = msgspec.structs.replace(
        COST, prefill=(0.02, 1e-4, 0.0, 0.0), decode=(0.025, 0.001, 0.0), tile_tokens=128
    )
    table = InstanceTable(0.1, sizes_chunks)
    for row in range(2):
        joining = info(f"m{row}", cost=cost)
        table.join(row, msgspec.structs.replace(joining, chunk_tokens=2048))
    return table


def test_prompts_take_longer_beside_the_decodes_of_a_mixed_instance() -> None:
    table = mixed_table()
    alone_s = table.prefill_s(1000, 0.0)[0]
    assert table.prefill_s(1000, 0.0)[1] == alone_s == pytest.approx(0.12)
    table.book_decode(1, 500, 10)
    # 85 ms of a step, 10 of them for the decodes, 20 for each step: 550 tokens and 10 decodes
    # round down to 4 tiles, which leave 502 tokens.
    found = table.prefill_s(1000, 0.0)
    assert found[0] == alone_s
    assert found[1] == pytest.approx(1000 / 502 * (0.02 + 0.0502 + 0.01))
    assert table.prefill_s(400, 0.0)[1] == pytest.approx(0.02 + 0.04 + 0.01), "one step"
    assert table.prefill_s(1000, np.array([0.0, 600.0]))[1] == pytest.approx(0.07)
    table.book_decode(1, 500, 60)
    # There is room for less than a tile: the instance takes the smallest number of tokens that
    # holds a chunk.
    assert table.prefill_s(1000, 0.0)[1] == pytest.approx(1000 / 58 * (0.02 + 0.0058 + 0.07))


@pytest.mark.parametrize("prefill", [(0.05, 0.0, 0.0, 0.0), (0.0, 0.0, 1e-9, 0.0), (0.0,) * 4])
@pytest.mark.parametrize("role", list(Role))
def test_a_spoilt_profile_stretches_no_prompt_beyond_its_steps(
    role: Role, prefill: tuple[float, float, float, float]
) -> None:
    """Predictions must stay sensible if a busy machine's profile gives none of a prefill's time to
    its tokens. Predictions of hours would reject every prompt."""
    cost = msgspec.structs.replace(COST, prefill=prefill, decode=(0.02, 0.001, 1e-6))
    table = InstanceTable(0.1)
    joining = info("m0", cost=cost)
    table.join(0, msgspec.structs.replace(joining, role=role, chunk_tokens=512))
    table.book_decode(0, 500, 10)
    alone_s = cost.prefill_s(1000, 0)
    if role is Role.DECODE:
        found = table.chunked_prefill_s(np.array([0]), np.array([alone_s]), 1000.0)
    else:
        table.set_role(0, True, role is Role.MIXED)
        found = table.prefill_s(1000, 0.0)
    # The prompt has at most 1,000 tokens in chunks of 32, each in a step of less than 0.1 s.
    assert (found <= 1000 / 32 * 0.1).all()


def test_without_chunks_by_the_slo_the_profile_holds() -> None:
    table = mixed_table(sizes_chunks=False)
    table.book_decode(1, 500, 10)
    assert table.prefill_s(1000, 0.0)[1] == pytest.approx(0.12)
