"""Tests Algorithm 1 and its corrections: for each correction, a test fails with the paper's
version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conductor_instances import info

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.decode_forecast import SurvivalForecast
from moonpool.conductor.placement.choice import Placement, Rejection, place
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig
from moonpool.kvcache.prefix_index import FEW, Depths, PrefixMatch

CONFIG = ConductorConfig()
TOKEN_BYTES = 1000


def view(name: str, **known: Any) -> dict[str, Any]:
    """Makes an instance with the fields of the reservations; a block is one token here.
    `hit_tokens` are held on the instance or being computed, `source_tokens` are held now."""
    values: dict[str, Any] = {
        "name": name,
        "host_id": "",
        "source_tokens": 0,
        "dram_tokens": None,  # number of tokens before the first SSD-only token; None means all
        "ssd_bytes_per_s": 4e6,  # loads a token in 0.25 ms; computing it takes 1 ms
        "queue_s": 0.0,
        "num_fetches_served": 0,
        "decode_batch": 0,
        "decode_context_tokens": 0,
        "room_tokens": 100_000,
        "last_placed_s": float("-inf"),
    }
    assert set(known) <= {*values, "hit_tokens"}
    return values | {"hit_tokens": known.get("source_tokens", 0)} | known


def demand(num_tokens: int = 1000, **known: Any) -> RequestFootprint:
    values: dict[str, Any] = {
        "number": 1,
        "num_tokens": num_tokens,
        "expected_tokens": num_tokens + 100,
        "decodes": True,
        "block_tokens": 1,
        "token_bytes": TOKEN_BYTES,
        "answer_s": 6.0,
    }
    return RequestFootprint(**(values | known))


def books_of(*views: dict[str, Any]) -> tuple[ClusterState, PrefixMatch]:
    cluster_state = ClusterState(SurvivalForecast())
    table = cluster_state.instance_table
    for row, known in enumerate(views):
        cluster_state.join(info(known["name"], host_id=known["host_id"], num_blocks=100_000))
        table.s_per_ssd_byte[row] = 1.0 / known["ssd_bytes_per_s"]
        table.room_tokens[row] = known["room_tokens"]
        table.waiting_ns[row] = known["queue_s"] * 1e9
        table.num_serving[row] = known["num_fetches_served"]
        table.book_decode(row, 0, known["decode_batch"])
        table.booked_context[row] = known["decode_context_tokens"]
        table.last_placed_s[row] = known["last_placed_s"]
    held = np.array([known["source_tokens"] for known in views], dtype=np.float64)
    hits = np.array([known["hit_tokens"] for known in views], dtype=np.float64)
    match = match_of(held, hits)
    if all(known["dram_tokens"] is None for known in views):
        return cluster_state, match
    known_dram = [known["dram_tokens"] for known in views]
    in_dram = np.array([h if d is None else d for h, d in zip(held, known_dram, strict=True)])
    near = np.where(in_dram < held, in_dram, hits)
    return cluster_state, match._replace(held_in_dram=in_dram, hits_in_dram=near)


def match_of(held: Depths, hits: Depths) -> PrefixMatch:
    """Returns the match as the index gives it."""
    few: tuple[int, ...] = ()
    for depth in sorted({int(depth) for depth in held if depth}, reverse=True):
        rows = tuple(int(row) for row in np.flatnonzero(held >= depth))
        if len(rows) > FEW:
            return PrefixMatch(held, hits, int(held.max()), few, depth)
        few = rows
    return PrefixMatch(held, hits, int(held.max(initial=0)), few)


def decided(
    wanted: RequestFootprint, *views: dict[str, Any], config: ConductorConfig = CONFIG
) -> Placement | Rejection:
    cluster_state, match = books_of(*views)
    return place(wanted, cluster_state.instance_table, match, config, now=0.0)


def placed(
    wanted: RequestFootprint, *views: dict[str, Any], config: ConductorConfig = CONFIG
) -> Placement:
    decision = decided(wanted, *views, config=config)
    assert isinstance(decision, Placement), decision
    return decision


def rejected(wanted: RequestFootprint, *views: dict[str, Any]) -> Rejection:
    decision = decided(wanted, *views)
    assert isinstance(decision, Rejection), decision
    return decision


# Placement of the prefill:


def test_the_shortest_ttft_wins_over_the_longest_hit() -> None:
    busy = view("p0", source_tokens=900, queue_s=2.0)
    idle = view("p1", host_id="far")
    decision = placed(demand(), busy, idle, view("d0"), config=ConductorConfig())
    assert decision.prefill == "p1"
    assert decision.ttft_s == pytest.approx(0.1 + 0.9), "with the fetch of what p0 has"


def test_ties_go_to_the_instance_idle_longest() -> None:
    views = [view("p0", last_placed_s=5.0), view("p1", last_placed_s=3.0), view("d0")]
    assert placed(demand(), *views).prefill == "p1"
    views[1] = view("p1", last_placed_s=7.0)
    assert placed(demand(), *views).prefill == "p0"


def test_no_hit_anywhere_is_no_fetch() -> None:
    decision = placed(demand(), view("p0"), view("p1"), view("d0"))
    assert decision.fetch_from is None and decision.fetch_tokens == 0
    assert decision.prefill_s == pytest.approx(1.0)


def test_a_hit_elsewhere_and_none_here_is_worth_a_fetch() -> None:
    """The paper's ratio divides by the local hit, which is 0 here."""
    high = ConductorConfig(kvcache_balancing_threshold=100.0)
    source = view("d0", source_tokens=800, host_id="h")
    decision = placed(demand(), view("p0", host_id="h"), source, config=high)
    assert (decision.fetch_from, decision.fetch_tokens) == ("d0", 800)
    assert decision.hit_tokens == 800


def test_at_the_threshold_there_is_neither_fetch_nor_its_score() -> None:
    config = ConductorConfig(kvcache_balancing_threshold=2.0)
    local = view("p0", source_tokens=400, host_id="h")
    at = placed(demand(), local, view("d0", source_tokens=800, host_id="h"), config=config)
    assert at.fetch_from is None and at.hit_tokens == 400
    assert at.ttft_s == at.prefill_s == pytest.approx(0.6)
    over = placed(demand(), local, view("d0", source_tokens=801, host_id="h"), config=config)
    assert over.fetch_from == "d0" and over.ttft_s < 0.6


def test_no_fetch_when_computing_is_faster() -> None:
    """The threshold only permits a fetch. A fetch of a token takes as long as its computation
    here."""
    near = placed(demand(), view("p0", host_id="h"), view("d0", source_tokens=500, host_id="h"))
    assert near.fetch_from == "d0"
    slow = view("d0", source_tokens=500, num_fetches_served=1)
    far = placed(demand(), view("p0"), slow)
    assert far.fetch_from is None and far.ttft_s == pytest.approx(1.0)


def test_a_fetch_runs_while_the_request_waits() -> None:
    """A plain sum of the times would be 0.5 + 0.5 + 0.5 for the fetch, so that computing (0.5 +
    1.0) would seem equally fast."""
    decision = placed(demand(), view("p0", queue_s=0.6), view("d0", source_tokens=500))
    assert decision.fetch_from == "d0"
    assert decision.ttft_s == pytest.approx(max(0.6, 0.5) + 0.5)


def test_a_prefix_on_a_decode_instance_can_be_fetched() -> None:
    source = view("d0", source_tokens=900, host_id="h")
    decision = placed(demand(), view("p0", source_tokens=100, host_id="h"), source)
    assert (decision.fetch_from, decision.fetch_tokens) == ("d0", 900)


def test_only_blocks_held_now_can_be_fetched() -> None:
    expecting = view("p1", hit_tokens=900, source_tokens=0, queue_s=9.0)
    decision = placed(demand(), view("p0", host_id="h"), expecting, view("d0"))
    assert decision.prefill == "p0" and decision.fetch_from is None


def test_a_busy_source_is_shared() -> None:
    busy = view("d0", source_tokens=500, host_id="h", num_fetches_served=5)
    idle = view("d1", source_tokens=500, host_id="h", num_fetches_served=0)
    assert placed(demand(), view("p0", host_id="h"), busy, idle).fetch_from == "d1"


def test_an_instance_does_not_fetch_from_itself() -> None:
    mixed = view("m0", source_tokens=500, hit_tokens=0)
    assert placed(demand(), mixed).fetch_from is None


def test_reading_its_own_ssd_costs_an_instance_time() -> None:
    decision = placed(demand(), view("p0", source_tokens=800, dram_tokens=200), view("d0"))
    assert (decision.hit_tokens, decision.held_blocks) == (800, 200)
    assert decision.ttft_s == pytest.approx(600 * 0.00025 + 0.2)
    best = decision.chosen.candidates[0]
    assert best.load_tokens == 600 and "(600 of them on its SSD)" in str(best)


def test_blocks_that_are_computed_sooner_than_read_are_computed() -> None:
    slow = view("p0", source_tokens=800, dram_tokens=200, ssd_bytes_per_s=5e5)
    decision = placed(demand(), slow, view("d0"))
    assert (decision.hit_tokens, decision.chosen.candidates[0].load_tokens) == (200, 0)
    assert decision.ttft_s == decision.prefill_s == pytest.approx(0.8)


def test_an_ssd_is_read_while_the_request_waits() -> None:
    slow = view("p0", source_tokens=800, dram_tokens=200, ssd_bytes_per_s=5e5, queue_s=2.0)
    for name in ("load-balancing", "cache-aware", "random", "kvcache-centric"):
        decision = placed(demand(), slow, view("d0"), config=policy(name))
        assert decision.ttft_s == pytest.approx(2.0 + 0.2) and decision.hit_tokens == 800


def test_a_source_reads_its_ssd_before_it_sends() -> None:
    source = view("d0", source_tokens=800, dram_tokens=100, host_id="h")
    decision = placed(demand(), view("p0", source_tokens=300, host_id="h"), source)
    assert (decision.fetch_from, decision.fetch_tokens) == ("d0", 800)
    assert decision.source_load_s == pytest.approx(500 * 0.00025)
    assert decision.ttft_s == pytest.approx(500 * 0.00025 + 500 * 0.00001 + 0.2)
    far = view("d0", source_tokens=800, dram_tokens=100, ssd_bytes_per_s=1e6, host_id="h")
    assert placed(demand(), view("p0", source_tokens=300, host_id="h"), far).fetch_from is None


def test_of_equal_sources_one_with_the_prefix_in_dram_is_chosen() -> None:
    below = view("d0", source_tokens=800, dram_tokens=0, host_id="h")
    above = view("d1", source_tokens=800, num_fetches_served=1, host_id="h")
    decision = placed(demand(), view("p0", host_id="h"), below, above)
    assert (decision.fetch_from, decision.source_load_s) == ("d1", 0.0)


def test_a_load_and_a_fetch_go_on_at_once() -> None:
    local = view("p0", source_tokens=400, dram_tokens=0, host_id="h")
    source = view("d0", source_tokens=800, host_id="h")
    decision = placed(demand(), local, source)
    assert decision.fetch_from == "d0"
    assert decision.ttft_s == pytest.approx(max(400 * 0.00025, 400 * 0.00001) + 0.2)
    assert decision.chosen.candidates[0].load_tokens == 400


def test_of_many_sources_the_one_with_the_longest_prefix_is_chosen() -> None:
    holders = [view(f"d{n}", source_tokens=1, host_id="h") for n in range(40)]
    holders[23] = view("d23", source_tokens=700, host_id="h")
    decision = placed(demand(), *holders, view("p0", host_id="h"))
    assert (decision.fetch_from, decision.fetch_tokens) == ("d23", 700)


def test_a_busy_source_is_replaced_by_an_equal_one() -> None:
    crowd = [view(f"d{n}", source_tokens=690, num_fetches_served=n % 5 + 1) for n in range(40)]
    crowd[23] = view("d23", source_tokens=690)
    idle = view("d99", source_tokens=700)
    far = view("p0", queue_s=0.8)
    assert placed(demand(), *crowd, idle, far).fetch_from == "d99"
    busy = view("d99", source_tokens=700, num_fetches_served=9)
    assert placed(demand(), *crowd, busy, far).fetch_from == "d23"


def test_the_explanation_names_the_best_candidates() -> None:
    few = placed(demand(), view("p0", queue_s=1.0), view("p1"), view("d0")).chosen.lines()
    assert [line.split(":")[0] for line in few[:2]] == ["p1", "p0"]
    assert few[2].startswith("prefill on p1, decode on d0; predicted TTFT 1.000 s")
    assert len(few) == 3
    crowd = [view(f"p{n}", queue_s=9.0 - n) for n in range(9)]
    many = placed(demand(), *crowd, view("d0")).chosen.lines()
    assert [line.split(":")[0] for line in many[:4]] == ["p8", "p7", "p6", "p5"]
    assert many[4].startswith("5 other instances") and len(many) == 6


# The other policies:


def policy(name: Any, seed: int = 0) -> ConductorConfig:
    return ConductorConfig(placement=name, seed=seed)


def test_load_balancing_goes_to_the_shortest_queue() -> None:
    """The policy uses a cached prefix on the instance that holds it, but never fetches one."""
    views = (
        view("p0", source_tokens=900, queue_s=0.2, host_id="h"),
        view("p1", source_tokens=300, queue_s=0.1, host_id="h"),
        view("d0"),
    )
    decision = placed(demand(), *views, config=policy("load-balancing"))
    assert (decision.prefill, decision.fetch_from) == ("p1", None)
    assert decision.ttft_s == pytest.approx(0.1 + 0.7) and decision.hit_tokens == 300


def test_cache_aware_weighs_queue_against_hits_but_never_fetches() -> None:
    views = (
        view("p0", source_tokens=900, queue_s=0.2, host_id="h"),
        view("p1", queue_s=0.0, host_id="h"),
        view("d0", host_id="h"),
    )
    decision = placed(demand(), *views, config=policy("cache-aware"))
    assert (decision.prefill, decision.fetch_from) == ("p0", None)
    assert decision.ttft_s == pytest.approx(0.2 + 0.1)
    centric = placed(demand(), *views)
    assert (centric.prefill, centric.fetch_from) == ("p1", "p0"), "this one fetches"


@pytest.mark.long
def test_random_is_uniform_and_follows_from_seed_and_number() -> None:
    views = (view("p0", queue_s=5.0), view("p1"), view("p2"), view("d0"))
    chosen = [placed(demand(number=n), *views, config=policy("random")).prefill for n in range(900)]
    assert {name: 250 < chosen.count(name) < 350 for name in ("p0", "p1", "p2")} == {
        "p0": True,
        "p1": True,
        "p2": True,
    }
    again = [placed(demand(number=n), *views, config=policy("random")).prefill for n in range(20)]
    assert again == chosen[:20]
    other = [
        placed(demand(number=n), *views, config=policy("random", 1)).prefill for n in range(20)
    ]
    assert other != again


@pytest.mark.parametrize("name", ["random", "load-balancing", "cache-aware", "kvcache-centric"])
def test_no_policy_chooses_an_impossible_instance(name: str) -> None:
    for number in range(20):
        decision = placed(
            demand(number=number),
            view("m0", room_tokens=10, source_tokens=900),
            view("p0", queue_s=3.0),
            view("d0", room_tokens=10, source_tokens=900),
            view("d1", decode_batch=5),
            config=policy(name),
        )
        assert (decision.prefill, decision.decode) == ("p0", "d1")


# Placement of the decode:


def test_decode_goes_to_the_smallest_tbt() -> None:
    busy, idle = view("d0", decode_batch=4, source_tokens=900), view("d1")
    assert placed(demand(), view("p0"), busy, idle).decode == "d1"


def test_among_near_equals_the_one_that_holds_most() -> None:
    one = view("d0", decode_batch=4, last_placed_s=1.0)
    two = view("d1", decode_batch=4, decode_context_tokens=10, source_tokens=512, last_placed_s=2.0)
    assert placed(demand(), view("p0"), one, two).decode == "d1"
    assert placed(demand(), view("p0"), one, view("d1", decode_batch=4)).decode == "d1"
    assert (
        placed(demand(), view("p0"), one, view("d1", decode_batch=4, last_placed_s=2.0)).decode
        == "d0"
    )


def test_an_instance_without_room_is_not_chosen() -> None:
    full, busy = view("d0", room_tokens=1099), view("d1", decode_batch=9)
    assert placed(demand(), view("p0"), full, busy).decode == "d1"
    exact = view("d0", room_tokens=1100)
    assert placed(demand(), view("p0"), exact, busy).decode == "d0"


def test_one_token_needs_no_decode_instance() -> None:
    decision = placed(demand(decodes=False), view("p0"), view("d0", room_tokens=0))
    assert decision.decode is None and decision.tbt_s == 0.0


# Mixed instances:


def test_a_mixed_instance_goes_on_by_itself() -> None:
    decision = placed(demand(), view("m0"), view("d0"))
    assert (decision.prefill, decision.decode) == ("m0", None)
    assert decision.tbt_s > 0


def test_a_prefill_instance_may_hand_over_to_a_mixed_one() -> None:
    decision = placed(demand(), view("p0"), view("m0", queue_s=5.0))
    assert (decision.prefill, decision.decode) == ("p0", "m0")


def test_a_full_mixed_instance_does_not_stand_for_all() -> None:
    full = view("m0", room_tokens=10)
    other = placed(demand(), full, view("m1", queue_s=0.5))
    assert (other.prefill, other.decode) == ("m1", None)
    pair = placed(demand(), full, view("p0", queue_s=0.5), view("d0"))
    assert (pair.prefill, pair.decode) == ("p0", "d0")
    assert rejected(demand(), full).reason == "no_decode_capacity"


def test_a_prefill_on_a_mixed_instance_needs_room_too() -> None:
    only_token = demand(decodes=False, expected_tokens=1000)
    assert placed(only_token, view("p0", room_tokens=0), view("d0")).prefill == "p0"
    full = rejected(only_token, view("m0", room_tokens=999))
    assert full.message.startswith("no instance has room for 1000 more tokens")
    assert placed(only_token, view("m0", room_tokens=1000)).prefill == "m0"


def test_a_mixed_instance_with_a_large_batch_makes_the_answer_slow() -> None:
    """Each of ten decodes adds 10 ms to a step. A fifth of 100 tokens takes 2 s."""
    views = view("m0", source_tokens=500, decode_batch=10), view("m1", host_id="far")
    assert placed(demand(100), *views).prefill == "m0", "with one token all that counts is TTFT"
    wanted = demand(100, answer_tokens=100)
    assert placed(wanted, *views).prefill == "m1"
    other = ConductorConfig(placement="cache-aware")
    assert placed(wanted, *views, config=other).prefill == "m1"


def test_what_decodes_elsewhere_takes_the_least_time_that_it_can() -> None:
    """m0 is faster by 0.1 s for the prompt, and slower by 0.2 s for the answer."""
    wanted = demand(100, answer_tokens=100)
    busy = view("m0", decode_batch=1)
    assert placed(wanted, busy, view("p0", queue_s=0.1), view("d0")).prefill == "p0"
    assert placed(wanted, busy, view("p0", queue_s=0.3), view("d0")).prefill == "m0"


# Refusals:


def test_no_instance_is_up() -> None:
    assert (rejected(demand()).status, rejected(demand()).reason) == (503, "no_prefill_instance")
    assert rejected(demand(), view("d0")).reason == "no_prefill_instance"
    assert rejected(demand(), view("p0")).reason == "no_decode_instance"


def test_a_rejection_for_room_says_whether_waiting_helps() -> None:
    full = view("d0", room_tokens=5, decode_batch=2)
    refusal = rejected(demand(), view("p0"), full, view("d1", room_tokens=5))
    assert (refusal.status, refusal.reason) == (503, "no_decode_capacity")
    assert "1100 more tokens" in refusal.message and refusal.room_tokens == 1100
    larger = demand(num_tokens=100, expected_tokens=100_001)
    hopeless = rejected(larger, view("p0"), full)
    assert (hopeless.status, hopeless.retry_after_s) == (422, float("inf"))
    assert "not even an idle one" in hopeless.message


def test_a_prompt_longer_than_any_instance() -> None:
    refusal = rejected(demand(num_tokens=100_001, expected_tokens=1), view("p0"), view("d0"))
    assert (refusal.status, refusal.reason) == (422, "no_prefill_capacity")
    assert "100001 tokens" in refusal.message and "shorten" in refusal.message


def of_contexts(wanted: RequestFootprint, **contexts: int) -> Placement | Rejection:
    """Returns the placement among idle instances with these context sizes. Of equal instances, the
    first is taken."""
    cluster_state = ClusterState(SurvivalForecast())
    for name, tokens in contexts.items():
        cluster_state.join(info(name, num_blocks=100_000, context_tokens=tokens))
    zeros = np.zeros(len(contexts))
    return place(wanted, cluster_state.instance_table, match_of(zeros, zeros), CONFIG, now=0.0)


@pytest.mark.parametrize(
    ("num_tokens", "context", "where"),
    [(300, 400, "m0"), (511, 512, "m0"), (300, 513, "m1"), (512, 513, "m1"), (4000, 4090, "m1")],
)
def test_a_prompt_goes_where_it_and_its_answer_fit(
    num_tokens: int, context: int, where: str
) -> None:
    wanted = demand(num_tokens=num_tokens, expected_tokens=context, context_tokens=context)
    decision = of_contexts(wanted, m0=512, m1=4096)
    assert isinstance(decision, Placement) and decision.prefill == where


def test_a_decode_instance_is_long_enough_for_the_answer_and_a_prefill_one_for_the_prompt() -> None:
    wanted = demand(num_tokens=500, expected_tokens=800, context_tokens=800)
    decision = of_contexts(wanted, p0=512, d0=512, d1=1000)
    assert isinstance(decision, Placement)
    assert (decision.prefill, decision.decode) == ("p0", "d1")
    whole = demand(num_tokens=512, expected_tokens=512, context_tokens=512, decodes=False)
    alone = of_contexts(whole, p0=512, d0=512)
    assert isinstance(alone, Placement) and alone.prefill == "p0", "an embedding has no answer"


def test_a_prompt_that_fits_no_context_is_told_the_longest() -> None:
    wanted = demand(num_tokens=4097, expected_tokens=4098, context_tokens=4098)
    refusal = of_contexts(wanted, m0=512, m1=4096)
    assert isinstance(refusal, Rejection)
    assert (refusal.status, refusal.reason) == (422, "no_prefill_capacity")
    assert "the 4096 tokens of context" in refusal.message


@pytest.mark.parametrize(
    ("num_tokens", "context", "contexts", "reason"),
    [
        (400, 401, {"m0": 400}, "no_prefill_capacity"),
        (400, 401, {"p0": 400, "d0": 800}, "no_prefill_capacity"),
        (500, 501, {"p0": 800, "d0": 400}, "no_decode_capacity"),
        (500, 800, {"m0": 512, "d0": 4096}, "no_decode_capacity"),
    ],
)
def test_a_prompt_for_which_no_idle_instance_has_context_does_not_wait(
    num_tokens: int, context: int, contexts: dict[str, int], reason: str
) -> None:
    wanted = demand(num_tokens=num_tokens, expected_tokens=context, context_tokens=context)
    refusal = of_contexts(wanted, **contexts)
    assert isinstance(refusal, Rejection)
    assert (refusal.status, refusal.reason) == (422, reason)
    assert refusal.retry_after_s == float("inf")


def test_instances_to_avoid_are_left_out() -> None:
    cluster_state, match = books_of(view("p0"), view("p1", queue_s=1.0), view("d0"), view("d1"))
    decision = place(demand(), cluster_state.instance_table, match, CONFIG, 0.0, avoid=(0, 2))
    assert isinstance(decision, Placement)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert isinstance(
        place(demand(), cluster_state.instance_table, match, CONFIG, 0.0, avoid=(0, 1)), Rejection
    )
    assert list(cluster_state.instance_table.prefills) == [True, True, False, False], (
        "nothing was written"
    )


def test_placing_changes_nothing() -> None:
    views = [view("p0", queue_s=1.0), view("p1"), view("d0", source_tokens=64)]
    cluster_state, match = books_of(*views)
    once = place(demand(), cluster_state.instance_table, match, CONFIG, 0.0)
    assert place(demand(), cluster_state.instance_table, match, CONFIG, 0.0) == once
    assert list(match.held) == [0, 0, 64]
