"""Tests that the bound is never below the result of a run, and that the search's result lies
between the policies' and the bound."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import ADMISSIONS, Config, ConfigError
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from moonpool_lab.oracle.bound import Bound, upper_bound
from moonpool_lab.oracle.cluster import limits_of
from moonpool_lab.oracle.search import Budget, Chosen, Runner, best_schedule

BLOCK = 256


def config_of(
    prefill: int, decode: int, mixed: int, slo: tuple[float, float], **more: Any
) -> Config:
    cluster = {"prefill": prefill, "decode": decode, "mixed": mixed}
    slos = {"ttft_s": slo[0], "tbt_s": slo[1]}
    return parse_config("", {"cluster": cluster, "slo": slos, **more}, DEFAULTS)


def workload(rng: random.Random, number: int, gap_s: float, most_tokens: int) -> list[Arrival]:
    """Makes prompts of which some continue an earlier prompt, as conversations do."""
    made: list[Arrival] = []
    at_s = 0.0
    for n in range(number):
        tokens = rng.randint(100, most_tokens)
        keys = private_keys(n, tokens, BLOCK)
        if made and rng.random() < 0.5:
            earlier = rng.choice(made).keys[: rng.randint(0, 40)]
            tokens = max(tokens, len(earlier) * BLOCK + 1)
            keys = (*earlier, *private_keys(n, tokens, BLOCK)[len(earlier) :])
        made.append(Arrival(at_s, tokens, rng.choice([1, 3, 20, 150]), keys))
        at_s += rng.expovariate(1 / gap_s) if rng.random() < 0.7 else 0.0
    return made


def frame(settings: Config, arrivals: list[Arrival]) -> tuple[Runner, Bound, Any, Any]:
    hardware = build_hardware(settings)
    demand, resources = limits_of(settings, hardware, arrivals)
    return (
        Runner(settings, hardware, arrivals, SimulationSettings()),
        upper_bound(demand, resources),
        demand,
        resources,
    )


CLUSTERS = [
    config_of(1, 1, 0, (4.0, 0.05)),
    config_of(2, 1, 0, (6.0, 0.15), hardware={"cost": "roofline"}),
    config_of(0, 0, 2, (5.0, 0.08), hardware={"cost": "roofline"}),
    config_of(1, 1, 1, (8.0, 0.06)),
    config_of(1, 1, 0, (3.0, 0.04), pool={"prefix_caching": False}, engine={"max_sequences": 6}),
    config_of(1, 1, 0, (10.0, 0.1), engine={"pipeline_parallel_size": 2}),
]


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.long if n > 4 else ()) for n in range(12)]
)
def test_no_policy_exceeds_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    settings = CLUSTERS[seed % len(CLUSTERS)]
    arrivals = workload(rng, 60, rng.choice([0.05, 0.3, 1.0]), 20_000)
    runner, bound, _, _ = frame(settings, arrivals)
    for name in ADMISSIONS:
        assert len(runner.policy(name)) <= bound.most


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_the_best_of_all_subsets_lies_between_search_and_bound(seed: int) -> None:
    rng = random.Random(100 + seed)
    arrivals = workload(rng, 8, 0.2, 16_000)
    runner, bound, demand, resources = frame(CLUSTERS[0], arrivals)
    optimum = max(
        len(runner.clairvoyant(frozenset(chosen)))
        for size in range(1, len(arrivals) + 1)
        for chosen in combinations(range(len(arrivals)), size)
    )
    starts: list[Chosen] = [runner.policy("early")]
    found = best_schedule(runner, demand, resources, starts, Budget(40))
    assert 0 < len(found.effective) <= optimum <= bound.most <= len(arrivals)
    assert len(found.effective) >= optimum - 1
    assert runner.clairvoyant(found.admitted) == found.effective


def test_the_bound_counts_what_prefill_can_do() -> None:
    """Ten equal prompts arrive together, of which the instance can compute three within the SLO."""
    arrivals = [Arrival(0.0, 16_000, 1, private_keys(n, 16_000, BLOCK)) for n in range(10)]
    prompt_s = build_hardware(CLUSTERS[0]).prefill.ground_truth.step_s  # the time of a whole prompt
    from moonpool.cost.model import Chunk

    one_s = prompt_s((Chunk(16_000, 0, 0, True),), 0, 0)
    slos = (3.4 * one_s, 0.05)
    _, bound, _, _ = frame(config_of(1, 1, 0, slos, conductor={"inline_chunks": False}), arrivals)
    assert bound.most == 3
    assert frame(config_of(1, 1, 0, slos), arrivals)[1].most == 6, "in chunks beside decodes"
    tight = config_of(1, 1, 0, (3.4 * one_s, 0.03))
    assert frame(tight, arrivals)[1].most == 3, "no step has room for a chunk"


def test_guessed_tokens_are_refused_in_one_line() -> None:
    drafts = {"method": "draft_model", "model": "llama3.2-1b"}
    speculating = config_of(1, 1, 0, (4.0, 0.05), engine={"speculative_config": drafts})
    with pytest.raises(ConfigError, match="no bound for instances that guess tokens: leave out"):
        limits_of(speculating, build_hardware(speculating), [])


def test_programs_are_refused_in_one_line() -> None:
    settings = config_of(1, 1, 0, (4.0, 0.05))
    calls = [
        Arrival(0.0, 100, 1, private_keys(n, 100, BLOCK), call=str(n), after=after)
        for n, after in enumerate([(), ("0",)])
    ]
    with pytest.raises(ConfigError, match="no bound for calls of programs"):
        limits_of(settings, build_hardware(settings), calls)


def test_shared_blocks_are_paid_once() -> None:
    """Of ten prompts that arrive together, all can be served if they share all blocks but one, and
    few if they share none."""
    shared = private_keys(0, 16_000, BLOCK)
    alike = [Arrival(0.0, 16_000, 1, shared) for _ in range(10)]
    private = [Arrival(0.0, 16_000, 1, private_keys(n, 16_000, BLOCK)) for n in range(10)]
    apart = {"inline_chunks": False}
    settings = config_of(1, 1, 0, (6.0, 0.05), conductor=apart)
    assert frame(settings, alike)[1].most == 10
    assert frame(settings, private)[1].most < 5
    uncached = config_of(1, 1, 0, (6.0, 0.05), pool={"prefix_caching": False}, conductor=apart)
    assert frame(uncached, alike)[1].most < 5


def test_the_bound_counts_what_decode_can_do() -> None:
    """The SLO of the answers leaves room for only a few at a time on the one decode instance."""
    arrivals = [Arrival(0.0, 500, 400, private_keys(n, 500, BLOCK)) for n in range(200)]
    settings = config_of(8, 1, 0, (30.0, 0.0285))
    runner, bound, _, _ = frame(settings, arrivals)
    assert len(runner.policy("early")) <= bound.most < 150
    assert bound.binding["decode pace"] > 0
