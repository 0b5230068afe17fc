"""Tests prompts that decode instances compute: short prompts by Mooncake's inline rule, and long
prompts in chunks if the prefill pool has a queue. Both rules keep the TBT SLO.

By the instances' cost a prompt's token takes 1 ms, a decode 10 ms and a token of context 1 us.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from conductor_instances import info

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.decode_forecast import SurvivalForecast
from moonpool.conductor.placement.choice import Placement, place
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig, Config, EngineConfig
from moonpool.kvcache.prefix_index import PrefixMatch

CHUNK_TOKENS = 200
TBT_SLO_S = 0.3


def demand(num_tokens: int, tbt_s: float = 0.3) -> RequestFootprint:
    return RequestFootprint(
        number=1,
        num_tokens=num_tokens,
        expected_tokens=num_tokens + 10,
        decodes=True,
        block_tokens=1,
        token_bytes=1,
        answer_s=5.0,
        tbt_s=tbt_s,
    )


def placed(
    wanted: RequestFootprint,
    *names: str,
    inline: bool = True,
    chunks: bool = False,
    prefill_queue_s: float = 1.0,
    decode_queue_s: float = 0.0,
    batch: int = 5,
    hits: dict[str, int] | None = None,
    **known: Any,
) -> Placement:
    """Gives every decode instance `batch` answers of 100 tokens."""
    cluster_state = ClusterState(SurvivalForecast(), TBT_SLO_S)
    table = cluster_state.instance_table
    for row, name in enumerate(names):
        joining = info(name, num_blocks=10_000, **known)
        cluster_state.join(msgspec.structs.replace(joining, chunk_tokens=CHUNK_TOKENS))
        if name.startswith("p"):
            table.waiting_ns[row] = prefill_queue_s * 1e9
        else:
            table.waiting_ns[row] = decode_queue_s * 1e9
            table.book_decode(row, 100, batch)
    held = np.array([float((hits or {}).get(name, 0)) for name in names])
    few = tuple(int(row) for row in np.flatnonzero(held))
    match = PrefixMatch(held, held, int(held.max()), few)
    config = ConductorConfig(inline_prefill=inline, inline_chunks=chunks)
    decision = place(wanted, table, match, config, now=0.0)
    assert isinstance(decision, Placement), decision
    return decision


@pytest.mark.parametrize(
    ("names", "inline", "num_others"),
    [
        (("p0", "d0"), True, 0),
        (("p0", "d0"), False, 0),
        (("p0", "p1", "d0", "d1"), True, 0),
        (("p0", "p1", "d0", "d1"), False, 0),
        (("m0", "m1"), True, 0),
        ((*(f"p{n}" for n in range(6)), "d0"), True, 3),
        ((*(f"p{n}" for n in range(6)), "d0"), False, 2),
        (tuple(f"m{n}" for n in range(5)), True, 1),
    ],
)
def test_the_instances_that_are_not_listed_are_counted(
    names: tuple[str, ...], inline: bool, num_others: int
) -> None:
    """If a decode instance computes the prompt, it must be listed in addition to the possible
    prefill instances."""
    chosen = placed(demand(150), *names, inline=inline).chosen
    assert chosen.num_others == num_others
    text = " ".join(chosen.lines())
    assert ("considered" in text) == (num_others > 0)
    assert ("1 other instance was considered" in text) == (num_others == 1)


def test_a_short_prompt_runs_where_it_is_decoded() -> None:
    decision = placed(demand(150), "p0", "d0")
    assert (decision.prefill, decision.decode, decision.decoder_row) == ("d0", None, 1)
    assert decision.fetch_from is None and decision.queue_s == 0.0
    assert decision.prefill_s == pytest.approx(0.15)
    step_s = 5 * 0.01 + 500e-6
    assert decision.ttft_s == pytest.approx(step_s + 0.15 + step_s), "after the step under way"
    assert decision.chosen.lines()[-1].startswith("prefill on d0; predicted TTFT 0.251 s")


def test_it_can_be_switched_off() -> None:
    decision = placed(demand(150), "p0", "d0", inline=False)
    assert (decision.prefill, decision.decode) == ("p0", "d0")


def test_a_prompt_that_needs_chunking_goes_to_the_prefill_pool() -> None:
    assert placed(demand(200, tbt_s=9.0), "p0", "d0").prefill == "d0"
    assert placed(demand(201, tbt_s=9.0), "p0", "d0").prefill == "p0"


def test_a_prompt_that_breaks_the_slo_goes_to_the_prefill_pool() -> None:
    step_s = 0.15 + 5 * 0.01 + 500e-6
    assert placed(demand(150, tbt_s=step_s + 1e-6), "p0", "d0").prefill == "d0"
    assert placed(demand(150, tbt_s=step_s - 1e-6), "p0", "d0").prefill == "p0"


def test_prompts_that_wait_inline_count() -> None:
    assert placed(demand(100), "p0", "d0", decode_queue_s=0.14).prefill == "d0"
    assert placed(demand(100), "p0", "d0", decode_queue_s=0.16).prefill == "p0"


def test_in_an_idle_cluster_the_pools_stay_apart() -> None:
    assert placed(demand(100), "p0", "d0", prefill_queue_s=0.0, batch=0).prefill == "p0"


def test_only_uncached_tokens_count() -> None:
    """Sends the next turn of a conversation to the instance that holds its last answer."""
    turn = demand(1000)
    assert placed(turn, "p0", "d0", "d1").prefill == "p0"
    decision = placed(turn, "p0", "d0", "d1", hits={"d1": 900})
    assert (decision.prefill, decision.decode, decision.hit_tokens) == ("d1", None, 900)


def test_an_engine_without_room_computes_no_prompts() -> None:
    assert placed(demand(150), "p0", "d0", engine_tokens=650).prefill == "d0"
    assert placed(demand(150), "p0", "d0", engine_tokens=649).prefill == "p0"


def test_a_request_for_one_token_is_not_inline() -> None:
    single = msgspec.structs.replace(demand(150), decodes=False)
    assert placed(single, "p0", "d0").prefill == "p0"


STEP_S = 5 * 0.01 + 500e-6  # the step time of the decodes alone
SHARED_S = 0.85 * TBT_SLO_S  # the planned time of a step with decodes and a chunk


def test_a_long_prompt_runs_in_chunks_where_the_prefill_pool_has_a_queue() -> None:
    decision = placed(demand(400), "p0", "d0", chunks=True, prefill_queue_s=9.0)
    assert (decision.prefill, decision.decode, decision.in_chunks) == ("d0", None, True)
    # The chunks of the prompt take the time that the decodes leave in each step.
    room_s = min(SHARED_S - STEP_S, CHUNK_TOKENS * 1e-3)
    assert decision.prefill_s == pytest.approx(0.4 * (room_s + STEP_S) / room_s)
    assert decision.ttft_s == pytest.approx(STEP_S + decision.prefill_s)
    assert placed(demand(400), "p0", "d0", prefill_queue_s=9.0).prefill == "p0", "switched off"


def test_it_must_halve_the_time_to_the_first_token() -> None:
    room_s = min(SHARED_S - STEP_S, CHUNK_TOKENS * 1e-3)
    ttft_s = STEP_S + 0.4 * (room_s + STEP_S) / room_s
    queue_s = 2 * ttft_s - 0.4
    assert placed(demand(400), "p0", "d0", chunks=True, prefill_queue_s=queue_s + 0.01).in_chunks
    assert not placed(
        demand(400), "p0", "d0", chunks=True, prefill_queue_s=queue_s - 0.01
    ).in_chunks


def test_no_chunk_where_it_would_break_the_slo_of_the_decodes() -> None:
    """A chunk of 128 tokens takes 0.128 s here."""
    least_s = (STEP_S + 0.128) / 0.85
    long = {"chunks": True, "prefill_queue_s": 9.0}
    assert placed(demand(400, tbt_s=least_s + 1e-6), "p0", "d0", **long).in_chunks
    assert not placed(demand(400, tbt_s=least_s - 1e-6), "p0", "d0", **long).in_chunks


def test_none_where_tenants_compete() -> None:
    competing = msgspec.structs.replace(demand(400), competes=True)
    assert placed(competing, "p0", "d0", chunks=True, prefill_queue_s=9.0).prefill == "p0"


def test_a_short_prompt_that_does_not_fit_one_step_may_run_in_chunks() -> None:
    queued = {"decode_queue_s": 0.3, "prefill_queue_s": 9.0}
    assert placed(demand(150), "p0", "d0", **queued).prefill == "p0"
    assert placed(demand(150), "p0", "d0", chunks=True, **queued).in_chunks


def test_an_instance_of_unknown_chunks_takes_none() -> None:
    cluster_state = ClusterState(SurvivalForecast(), TBT_SLO_S)
    table = cluster_state.instance_table
    for name in ("p0", "d0"):
        cluster_state.join(info(name, num_blocks=10_000))
    table.waiting_ns[0] = 9e9
    none = np.zeros(2)
    decision = place(demand(400), table, PrefixMatch(none, none, 0, ()), ConductorConfig(), now=0.0)
    assert isinstance(decision, Placement) and decision.prefill == "p0"


def test_a_chunk_counts_in_the_steps_of_its_instance() -> None:
    cluster_state = ClusterState(SurvivalForecast(), TBT_SLO_S)
    table = cluster_state.instance_table
    for name in ("d0", "d1"):
        joining = info(name, num_blocks=10_000)
        cluster_state.join(msgspec.structs.replace(joining, chunk_tokens=CHUNK_TOKENS))
    before_s = table.tbt_s(0, 5, 500)
    table.book_chunked(0)
    assert table.tbt_s(0, 5, 500) == pytest.approx(before_s + 0.128)
    assert table.booked_tbt_s(100) == pytest.approx([0.0101 + 0.128, 0.0101])
    table.book_chunked(0, -1)
    assert table.tbt_s(0, 5, 500) == before_s


def test_only_instances_that_size_chunks_by_the_slo_are_given_long_prompts() -> None:
    assert Config().for_conductor().inline_chunks
    own = Config(engine=EngineConfig(batching="alternating"))
    assert not own.for_conductor().inline_chunks
