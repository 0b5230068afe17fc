"""The whole search on made-up clusters, where the cheapest is known."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.config import Config, parse_config
from moonpool.plan.advice import broken_by_fewer, sentence
from moonpool.plan.assess import FRESH_SEEDS_FROM, Assessor, PlanGoal, check
from moonpool.plan.candidate import CACHE_STEPS, Candidate, NodeKind, Priced, neighbours
from moonpool.plan.confidence import Verdict
from moonpool.plan.search import ClusterPlan, Planner
from moonpool.plan.trial import WHOLE, Span
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.prices import parse_prices
from tests.unit.plan.made_up import MadeUpWorkforce, Truth

A, B = NodeKind("A800-SXM", 8), NodeKind("H100-SXM", 8)
BASE = parse_config("", {"hardware": {"cost": "roofline"}}, DEFAULTS)
KV_BYTES = 327_680.0


def truth(prefill: float, decode: float, faster: float = 1.0, cache: float = 0.0) -> Truth:
    """`prefill` and `decode`: instances of A that are needed; B counts `faster` times. A small
    cache costs prefill: up to `cache` of it more."""

    def of(config: Config) -> tuple[float, float]:
        cluster, hardware = config.cluster, config.hardware
        hits = min(config.pool.dram_tokens_per_instance / 4_000_000, 1.0)
        needed = prefill * (1 + cache * (1 - hits))
        strong = faster if hardware.device == "H100-SXM" else 1.0
        strong_decode = faster if hardware.decode_device == "H100-SXM" else 1.0
        if cluster.mixed:
            share = strong * cluster.mixed / (needed + decode + 2)
            return share, 1.0
        return strong * cluster.prefill / needed, strong_decode * cluster.decode / decode

    return of


def priced(a: float = 1.5, b: float = 3.5, dram: float = 0.004) -> Priced:
    text = f"[devices]\nA800-SXM = {a}\nH100-SXM = {b}\n[dram]\nusd_per_gb_h = {dram}"
    return Priced(parse_prices(text), KV_BYTES)


def assessor(workforce: MadeUpWorkforce, price: Priced, **goal: object) -> Assessor:
    wanted = msgspec.structs.replace(PlanGoal(), **goal)
    return Assessor(workforce, BASE, wanted, price, WHOLE, 0.25)  # type: ignore[arg-type]


def starts() -> list[Candidate]:
    found = [Candidate(p, d, 4, 2, 0, 3_000_000, 2048) for p, d in product((A, B), repeat=2)]
    return [*found, *(Candidate(k, k, 0, 0, 6, 3_000_000, 256) for k in (A, B))]


def planned(
    workforce: MadeUpWorkforce, price: Priced, **goal: object
) -> tuple[ClusterPlan, Assessor]:
    used = assessor(workforce, price, **goal)
    return Planner(used, 200_000).plan(starts()), used


@settings(max_examples=25, deadline=None)
@given(
    prefill=st.floats(1.2, 9),
    decode=st.floats(0.5, 5),
    faster=st.floats(1.0, 4.0),
    cache=st.floats(0.0, 1.0),
    b=st.floats(1.0, 6.0),
)
@example(prefill=1.5, decode=4.4375, faster=1.0, cache=0.0, b=1.0)  # seven steps of cache down
def test_nothing_next_to_the_choice_is_cheaper_and_meets(
    prefill: float, decode: float, faster: float, cache: float, b: float
) -> None:
    workforce = MadeUpWorkforce(truth(prefill, decode, faster, cache), noise=0.01)
    price = priced(b=b)
    found, used = planned(workforce, price, max_runs=1000.0)
    assert found.complete and found.choice is not None
    assert found.choice.verdict is Verdict.MEETS
    for neighbour in found.neighbours:
        cheaper = neighbour.assessment.usd_per_h < found.choice.usd_per_h
        assert not (cheaper and neighbour.assessment.verdict is Verdict.MEETS)
    fresh = assessor(workforce, price, first_seed=FRESH_SEEDS_FROM, max_runs=1000.0)
    checked = check(found.choice.candidate, fresh, 200_000)
    assert checked.holds, checked.conclusion()
    assert used.runs < 160


@pytest.mark.parametrize(("b", "kinds"), [(1.6, (B, B)), (12.0, (A, A))])
def test_the_hardware_is_what_gives_most_for_its_price(
    b: float, kinds: tuple[NodeKind, NodeKind]
) -> None:
    found, _ = planned(MadeUpWorkforce(truth(6.0, 3.0, faster=2.0)), priced(b=b))
    assert found.choice is not None
    one = found.choice.candidate
    assert (one.kind, one.decode_kind) == kinds


def test_the_best_of_all_small_clusters_is_found() -> None:
    """Against every count and cache of one mix."""
    model, price = truth(5.0, 2.0, cache=0.5), priced(b=100.0)
    found, _ = planned(MadeUpWorkforce(model), price)
    assert found.choice is not None
    meets = [
        price.usd_per_h(one)
        for p, d, cache in product(range(1, 12), range(1, 6), CACHE_STEPS[1:])
        for one in [Candidate(A, A, p, d, 0, cache, 2048)]
        for shares in [model(one.config(BASE))]
        if min(shares[0], 1.0) * min(shares[1], 1.0) > 0.9062  # what 20,000 requests can tell
    ]
    assert found.choice.usd_per_h <= min(meets) * 1.0001


def test_dear_dram_buys_less_of_it() -> None:
    model = truth(5.0, 2.0, cache=0.3)
    sizes = []
    for dram in (0.0, 0.05):
        found, _ = planned(MadeUpWorkforce(model), priced(b=100.0, dram=dram))
        assert found.choice is not None
        sizes.append(found.choice.candidate.cache_tokens)
    assert sizes[1] < sizes[0]


def test_a_spent_budget_keeps_what_was_found_and_says_so() -> None:
    found, _ = planned(MadeUpWorkforce(truth(6.0, 3.0)), priced(), max_runs=14.0)
    assert not found.complete and 0 < found.runs < 40
    assert found.choice is not None and found.choice.verdict is Verdict.MEETS
    nothing, _ = planned(MadeUpWorkforce(truth(6.0, 3.0)), priced(), max_runs=1.0)
    assert nothing.choice is None and not nothing.complete
    assert "allow more with --runs" in sentence(nothing, [], BASE.slo, 0.9)


def test_where_nothing_meets_the_nearest_is_named() -> None:
    found, _ = planned(MadeUpWorkforce(lambda config: (0.5, 0.5)), priced())
    assert found.choice is None and found.neighbours == ()
    assert sentence(found, [], BASE.slo, 0.9).startswith("No cluster was found in which 90%")


def test_the_sentence_names_what_binds_and_what_one_fewer_breaks() -> None:
    found, used = planned(MadeUpWorkforce(truth(6.0, 2.0)), priced(b=100.0))
    assert found.choice is not None
    fewer = broken_by_fewer(found.neighbours, used.in_full)
    words = sentence(found, fewer, BASE.slo, 0.9)
    assert words.startswith("Buy 6P+2D of 8 x A800-SXM with ")
    assert "Prefill time is what binds." in words or "Decode speed is what binds." in words
    assert "One prefill instance fewer breaks the TTFT SLO" in words
    assert "One decode instance fewer breaks the TBT SLO" in words
    assert "at 00:00" in words


def test_the_same_simulations_are_asked_for_every_time() -> None:
    asked = []
    for _ in range(2):
        workforce = MadeUpWorkforce(truth(5.0, 2.0, 1.5, 0.4), noise=0.02)
        planned(workforce, priced())
        asked.append(workforce.asked)
    assert asked[0] == asked[1]


def test_what_costs_the_same_is_simulated_whole_only_if_the_busiest_part_speaks_for_it() -> None:
    """Other policies and chunks, all of which do as well as the choice here, or one better."""

    def with_policy(config: Config) -> tuple[float, float]:
        prefill, decode = truth(6.3, 2.0)(config)
        return prefill * (1.05 if config.pool.eviction == "length-aware" else 1.0), decode

    for model, better in ((truth(6.3, 2.0), False), (with_policy, True)):
        workforce = MadeUpWorkforce(model, noise=0.002)
        used = assessor(workforce, priced(b=100.0))
        span = Span(0.0, 60.0)
        used._span = span
        found = Planner(used, 200_000).plan(starts()[:1])
        assert found.choice is not None
        choice = found.choice.candidate
        assert choice.eviction == ("length-aware" if better else "lru")
        whole = {trial.config for trial in workforce.asked if trial.span == WHOLE}
        probed = {trial.config for trial in workforce.asked if trial.span == span}
        alike = [
            one.candidate.config(BASE)
            for one in neighbours(choice, 200_000)
            if used.usd_per_h(one.candidate) == found.choice.usd_per_h
        ]
        assert len(alike) == 5 and probed.issuperset(alike)
        others = [c for c in alike if c.pool.eviction == choice.eviction]
        assert whole.isdisjoint(others)


def test_a_cluster_that_misses_is_given_the_cheapest_that_helps() -> None:
    """Cache, where that is enough; else an instance, of the role that is short."""
    for needed, cache, expected in ((4.0, 1.0, (4, 2)), (5.2, 0.0, (5, 2))):
        workforce = MadeUpWorkforce(truth(needed, 1.5, cache=cache))
        used = assessor(workforce, priced(b=100.0))
        start = Candidate(A, A, 4, 2, 0, 2_000_000, 2048)
        found = Planner(used, 200_000)._grown_until_it_meets(start)
        assert found is not None and found.verdict is Verdict.MEETS
        assert (found.candidate.prefill, found.candidate.decode) == expected
