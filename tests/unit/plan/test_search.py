"""Runs the whole search on made-up clusters, where the cheapest cluster is known."""

from __future__ import annotations

from itertools import product
from typing import cast

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.plan.advice import broken_by_fewer
from moonpool.plan.answer import answer
from moonpool.plan.arrangements import Failure, arrangements
from moonpool.plan.assess import FRESH_SEEDS_FROM, Assessor, PlanGoal, check
from moonpool.plan.bounds import Bounds
from moonpool.plan.candidate import CACHE_STEPS, Candidate, NodeKind, Priced, Steps, neighbours
from moonpool.plan.demand import Demand, Prepared
from moonpool.plan.running_costs import costs_of
from moonpool.plan.search import ClusterPlan, Planner
from moonpool.plan.settings import grown
from moonpool.plan.simulation_pool import SimulationPool
from moonpool.plan.tables import print_plan
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.prices import parse_prices
from tests.unit.plan.made_up import MadeUpWorkforce, Truth, outcome

A, B = NodeKind("A800-SXM", 8), NodeKind("H100-SXM", 8)
BASE = parse_config("", {"hardware": {"cost": "roofline"}}, DEFAULTS)
KV_BYTES = 327_680.0
CHUNKS = (256, 512, 1024, 2048, 4096)
STEPS = Steps(CACHE_STEPS[2:-3], (0, 4_000_000), ("lru", "length-aware"), CHUNKS)


def truth(
    prefill: float, decode: float, faster: float = 1.0, cache: float = 0.0, chunk: int = 512
) -> Truth:
    """`prefill` and `decode` are the needed numbers of instances of A; an instance of B counts
    `faster` times. With a small cache, up to `cache` times more prefill is needed. SSD counts like
    a quarter of the same DRAM. A mixed instance counts as three quarters of an instance of each
    role, and as less if its chunk size is not `chunk`."""

    def of(config: Config) -> tuple[float, float]:
        cluster, hardware, pool = config.cluster, config.hardware, config.pool
        held = pool.dram_tokens_per_instance + pool.ssd_tokens_per_instance / 4
        needed = prefill * (1 + cache * (1 - min(held / 4_000_000, 1.0)))
        strong = faster if hardware.device == "H100-SXM" else 1.0
        decoder = hardware.decode_device or hardware.device
        strong_decode = faster if decoder == "H100-SXM" else 1.0
        mixed = 0.75 * cluster.mixed
        if cluster.mixed and config.engine.chunk_tokens != chunk:
            mixed *= 0.8
        # The mixed instances divide their time between the roles.
        total = needed / strong + decode / strong_decode
        own = cluster.prefill + cluster.decode + mixed
        prefills = strong * (cluster.prefill + mixed) / needed
        decodes = (strong_decode * cluster.decode + strong * mixed) / decode
        return min(prefills, own / total), decodes

    return of


class MadeUpBounds:
    """Bounds that exclude no candidate, and by which the load is that of all instances together."""

    def load(self, one: Candidate) -> float:
        return 5.0 / (one.num_instances - 0.25 * one.mixed)

    def most_share(self, one: Candidate) -> float:
        return 1.0


def priced(a: float = 1.5, b: float = 3.5, dram: float = 0.004) -> Priced:
    text = f"[devices]\nA800-SXM = {a}\nH100-SXM = {b}\n[dram]\nusd_per_gb_h = {dram}"
    return Priced(parse_prices(text), KV_BYTES)


def assessor(pool_of_runs: MadeUpWorkforce, price: Priced, **goal: object) -> Assessor:
    wanted = msgspec.structs.replace(PlanGoal(), **goal)
    return Assessor(cast("SimulationPool", pool_of_runs), BASE, wanted, price)


def starts(kinds: tuple[NodeKind, ...] = (A, B)) -> tuple[Candidate, ...]:
    found = [Candidate(p, d, 4, 2, 0, 3_000_000, 2048) for p, d in product(kinds, repeat=2)]
    return (*found, *(Candidate(k, k, 0, 0, 6, 3_000_000, 256) for k in kinds))


def prepared(kinds: tuple[NodeKind, ...] = (A, B)) -> Prepared:
    demand = Demand((0.0, 100.0), (1000, 1000), (0, 500), (10, 10))
    return Prepared(BASE, demand, starts(kinds), STEPS, "both", (), 1000)


def planned(
    pool_of_runs: MadeUpWorkforce,
    price: Priced,
    kinds: tuple[NodeKind, ...] = (A, B),
    **goal: object,
) -> tuple[ClusterPlan, Assessor]:
    used = assessor(pool_of_runs, price, **goal)
    return Planner(used, prepared(kinds), cast("Bounds", MadeUpBounds())).plan(), used


@settings(max_examples=6, deadline=None)
@given(
    prefill=st.floats(1.2, 5),
    decode=st.floats(0.5, 3),
    faster=st.floats(1.0, 4.0),
    cache=st.floats(0.0, 1.0),
    b=st.floats(1.0, 6.0),
)
# an example in which no cache is left to reduce
@example(prefill=3.0, decode=1.0, faster=1.0, cache=1.0, b=1.0)
@example(prefill=4.4375, decode=2.4375, faster=1.0, cache=0.0, b=1.0)
def test_nothing_next_to_the_choice_is_cheaper_and_meets(
    prefill: float, decode: float, faster: float, cache: float, b: float
) -> None:
    pool_of_runs = MadeUpWorkforce(truth(prefill, decode, faster, cache))
    found, _ = planned(pool_of_runs, priced(b=b), max_runs=2000.0)
    assert found.complete and found.choice is not None
    assert found.choice.share >= 0.9
    for neighbour in found.neighbours:
        cheaper = neighbour.assessment.usd_per_h < found.choice.usd_per_h
        assert not (cheaper and neighbour.assessment.meets(0.9))


@pytest.mark.parametrize(
    ("prefill", "decode", "cache", "chunk"),
    [(3.0, 1.0, 0.0, 256), (1.6, 1.3, 0.5, 512), (2.2, 1.4, 0.3, 2048), (0.9, 0.9, 0.0, 1024)],
)
def test_the_best_of_all_small_clusters_is_found(
    prefill: float, decode: float, cache: float, chunk: int
) -> None:
    """For one kind of node, the result must be within 1 % of the price of the best arrangement,
    cache, SSD and chunk size."""
    model, price = truth(prefill, decode, cache=cache, chunk=chunk), priced()
    found, _ = planned(MadeUpWorkforce(model), price, (A,), max_runs=2000.0)
    assert found.choice is not None
    best = float("inf")
    for one in arrangements(starts((A,)), "both", 6):
        for size, ssd, tokens in product(STEPS.caches, STEPS.ssds, STEPS.chunks):
            each = msgspec.structs.replace(
                one, cache_tokens=size, ssd_tokens=ssd, chunk_tokens=tokens
            )
            usd = price.usd_per_h(each)
            if usd < best and outcome(*model(each.config(BASE))).share >= 0.9:
                best = usd
    assert best <= found.choice.usd_per_h <= 1.011 * best


@pytest.mark.parametrize(("b", "kind"), [(1.6, B), (12.0, A)])
def test_the_hardware_is_what_gives_most_for_its_price(b: float, kind: NodeKind) -> None:
    found, _ = planned(MadeUpWorkforce(truth(4.0, 2.0, faster=2.0)), priced(b=b), max_runs=2000.0)
    assert found.choice is not None
    assert found.choice.candidate.kind == kind


def test_of_clusters_at_one_price_the_one_with_the_most_room_is_named() -> None:
    """Four instances are needed. 2P+2D bear half as much load again, and four mixed instances just
    enough, so 2P+2D must win."""

    def of(config: Config) -> tuple[float, float]:
        cluster = config.cluster
        mixed = 0.0 if cluster.prefill else 0.35 * cluster.mixed
        return (cluster.prefill + mixed) / 1.3, (cluster.decode + mixed) / 1.2

    found, _ = planned(MadeUpWorkforce(of), priced(), (A,))
    assert found.choice is not None
    assert found.choice.candidate.counts == "2P+2D"
    by_name = {room.candidate.counts: room for room in found.rooms}
    assert found.rooms[0].candidate == found.choice.candidate
    assert by_name["2P+2D"].kept == 1.5
    assert by_name["2P+2D"].missed == 2.0
    assert by_name["4M"].kept == 1.1
    words = answer(found, [], PlanGoal(), prepared(), priced()).text
    assert "Up to 1.5 times the trace's load of " in words and ", and not 2 times" in words
    assert "Breaks first: At 2 times the load, " in words


def test_dear_dram_buys_less_of_it() -> None:
    sizes = []
    for dram in (0.0, 0.05):
        found, _ = planned(MadeUpWorkforce(truth(3.0, 2.0, cache=0.3)), priced(dram=dram), (A,))
        assert found.choice is not None
        sizes.append(found.choice.candidate.cache_tokens)
    assert sizes[1] < sizes[0]


def test_a_failure_excludes_what_has_less_of_what_it_lacked() -> None:
    one = Candidate(A, A, 4, 2, 1, 1_000_000, 512)
    change = msgspec.structs.replace
    late, slow, both = Failure(one, 0.0), Failure(one, 1.0), Failure(one, 0.5)
    fewer_prefill, fewer_decode = change(one, prefill=3), change(one, decode=1)
    assert late.excludes(fewer_prefill) and not late.excludes(fewer_decode)
    # Fewer prefill instances admit less, which may help slow decodes.
    assert slow.excludes(fewer_decode) and not slow.excludes(fewer_prefill)
    assert both.excludes(change(one, mixed=0)) and not both.excludes(fewer_prefill)
    assert not late.excludes(change(one, prefill=3, decode=3))
    assert not late.excludes(change(fewer_prefill, decode_kind=B))


def test_it_grows_by_what_the_misses_lacked() -> None:
    def more(one: Candidate, prefill: float, decode: float) -> Candidate:
        found = outcome(prefill, decode)
        return grown(one, found.misses, 1.0 - found.share)

    one = Candidate(A, A, 8, 4, 0, 1_000_000, 2048)
    counts = [
        (found.prefill, found.decode)
        for found in (more(one, 0.5, 1.0), more(one, 1.0, 0.5), more(one, 0.5, 0.5))
    ]
    assert counts == [(12, 4), (8, 6), (14, 7)]
    assert more(Candidate(A, A, 0, 0, 8, 1_000_000, 256), 0.5, 1.0).mixed == 12


def test_a_spent_budget_keeps_what_was_found_and_says_so() -> None:
    found, _ = planned(MadeUpWorkforce(truth(4.0, 2.0)), priced(), max_runs=14.0)
    assert not found.complete and found.choice is not None and found.choice.share >= 0.9
    nothing, _ = planned(MadeUpWorkforce(truth(40.0, 30.0)), priced(), max_runs=3.0)
    assert nothing.choice is None and not nothing.complete
    assert "allow more with --runs" in answer(nothing, [], PlanGoal(), prepared(), priced()).text


def test_few_of_the_mixes_that_were_not_simulated_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = tuple(NodeKind(name, n) for name in ("A800-SXM", "H100-SXM") for n in (1, 2, 4, 8))
    found, _ = planned(MadeUpWorkforce(truth(4.0, 2.0)), priced(), kinds, max_runs=30.0)
    words = answer(found, [], PlanGoal(), prepared(kinds), priced())
    print_plan(found, words, 0.9, costs_of(found.choice, prepared(kinds), priced()))
    said = [line for line in capsys.readouterr().out.splitlines() if "not simulated" in line]
    untried = sum(mix.cheapest is None and not mix.num_simulated for mix in found.mixes)
    assert untried > 20 and len(said) == 7
    assert f"and {untried - 6} more from " in said[-1]


def test_a_time_limit_keeps_the_best_so_far() -> None:
    pool_of_runs = MadeUpWorkforce(truth(4.0, 2.0))
    used = Assessor(
        cast("SimulationPool", pool_of_runs),
        BASE,
        PlanGoal(time_limit_s=20.0),
        priced(),
        clock=lambda: float(pool_of_runs.num_run),  # a clock by which each run takes a second
    )
    found = Planner(used, prepared(), cast("Bounds", MadeUpBounds())).plan()
    assert "--time-limit" in found.stopped
    assert found.choice is not None and found.choice.share >= 0.9 and found.runs <= 30


def test_an_interrupt_keeps_the_best_so_far() -> None:
    pool_of_runs = MadeUpWorkforce(truth(4.0, 2.0))
    run = pool_of_runs.run

    def interrupted(*arguments: object) -> object:
        if pool_of_runs.num_run > 20:
            raise KeyboardInterrupt
        return run(*arguments)  # type: ignore[arg-type]

    pool_of_runs.run = interrupted  # type: ignore[method-assign, assignment]
    found, _ = planned(pool_of_runs, priced())
    assert found.stopped == "interrupted"
    assert found.choice is not None and found.choice.interval is None
    assert answer(found, [], PlanGoal(), prepared(), priced()).text.startswith("Buy ")


def test_where_nothing_meets_the_nearest_is_named() -> None:
    found, _ = planned(MadeUpWorkforce(lambda config: (0.5, 0.5)), priced())
    assert found.choice is None and found.neighbours == ()
    words = answer(found, [], PlanGoal(), prepared(), priced()).text
    assert words.startswith("No cluster was found in which 90%")
    stricter = answer(found, [], PlanGoal(wanted=0.995), prepared(), priced()).text
    assert stricter.startswith("No cluster was found in which 99.5%")


def test_the_sentence_says_what_is_promised_and_what_one_fewer_breaks() -> None:
    def by_number(config: Config) -> tuple[float, float]:
        cluster = config.cluster
        return 0.5 + 0.06 * (cluster.prefill + cluster.decode + cluster.mixed), 1.0

    pool_of_runs = MadeUpWorkforce(by_number, noise=0.04)
    found, used = planned(pool_of_runs, priced(b=100.0), (A,))
    choice = found.choice
    assert choice is not None and choice.interval is not None
    assert choice.share == pytest.approx(0.92) and len(choice.outcomes) == 7
    assert choice.interval.low < 0.9 < choice.interval.high
    fewer = broken_by_fewer(found.neighbours, used.in_full)
    words = answer(found, fewer, PlanGoal(), prepared(), priced()).text
    bought = priced().words(choice.candidate)
    assert bought.endswith(f" on {choice.candidate.num_instances} nodes of 8 A800-SXM")
    assert words.startswith(f"Buy {bought}, with ")
    assert f"another sample like the trace has {choice.interval.low:.1%} to" in words
    assert "first token within 30 s (TTFT, time to first token)" in words
    assert " instance fewer, " in words and "first tokens come too late" in words
    assert "at 00:00" in words
    # In draws, the attainment is up to four points lower, so a sure choice needs more.
    assert found.sure is not None and found.sure.interval is not None
    assert found.sure.usd_per_h > choice.usd_per_h and found.sure.interval.low >= 0.9
    assert "To be sure: At 95% confidence, buy " in words


def test_the_check_simulates_fresh_draws() -> None:
    pool_of_runs = MadeUpWorkforce(truth(4.0, 2.0), noise=0.02)
    found, _ = planned(pool_of_runs, priced(b=100.0), (A,))
    assert found.choice is not None
    fresh = assessor(pool_of_runs, priced(b=100.0), first_seed=FRESH_SEEDS_FROM)
    checked = check(found.choice, fresh)
    assert len(checked.fresh.outcomes) == 7 and checked.holds
    assert checked.conclusion().startswith(f"The promise holds: {checked.num_within} of 7")
    seeds = {trial.seed for trial in pool_of_runs.asked}
    assert seeds >= set(range(FRESH_SEEDS_FROM, FRESH_SEEDS_FROM + 7)) | set(range(7))


@pytest.mark.long
def test_the_same_simulations_are_asked_for_every_time() -> None:
    asked = []
    for _ in range(2):
        pool_of_runs = MadeUpWorkforce(truth(3.0, 2.0, 1.5, 0.4), noise=0.02)
        planned(pool_of_runs, priced())
        asked.append(pool_of_runs.asked)
    assert asked[0] == asked[1]


def test_the_policies_are_those_that_do_best() -> None:
    def with_policy(config: Config) -> tuple[float, float]:
        prefill, decode = truth(4.4, 2.0)(config)
        return prefill * (1.3 if config.conductor.admission == "predictive" else 1.0), decode

    found, _ = planned(MadeUpWorkforce(with_policy), priced(b=100.0), (A,))
    assert found.choice is not None and found.choice.candidate.admission == "predictive"
    around = neighbours(found.choice.candidate, STEPS)
    assert all(near.candidate.admission == "predictive" for near in around)
