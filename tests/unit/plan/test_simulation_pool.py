"""Tests that no trial is run twice, and that each trial has its own counts.
tests/unit/cli/test_plan.py compares a search on two processes with one on a single process."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.plan.simulation_pool import SimulationPool
from moonpool.plan.trial import Outcome, Span, Trial, Workload
from moonpool.sim.defaults import DEFAULTS
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate


@pytest.fixture(scope="module")
def workload() -> Workload:
    rows = tuple(generate(BUILT_IN["conversation"], num_requests=150, seed=3))
    return Workload(rows, BLOCK_TOKENS)


def trial(prefill: int = 2, decode: int = 1, **more: object) -> Trial:
    cluster = {"cluster": {"prefill": prefill, "decode": decode}}
    config = parse_config("", cluster, DEFAULTS)
    return msgspec.structs.replace(Trial(config), **more)


def outcomes(workload: Workload, trials: list[Trial], processes: int) -> list[Outcome]:
    with SimulationPool(workload, processes) as pool_of_runs:
        return pool_of_runs.run(trials)


def test_no_trial_is_run_twice(workload: Workload) -> None:
    done: list[int] = []
    with SimulationPool(workload, 1) as pool_of_runs:
        first = pool_of_runs.run([trial(), trial()], done.append)
        assert pool_of_runs.run([trial()], done.append) == first[:1]
        assert pool_of_runs.num_run == 1 and done == [1]


def test_every_request_is_met_or_missed_for_a_cause(workload: Workload) -> None:
    [found] = outcomes(workload, [trial(1, 1, speed=6.0)], 1)
    attainment = found.attainment
    assert attainment.num_requests == 150
    assert sum(found.misses.values()) == 150 - attainment.num_effective > 20
    assert sum(arrived for _, arrived, _ in found.misses_by_minute) == 150
    assert sum(missed for _, _, missed in found.misses_by_minute) == sum(found.misses.values())
    assert max(found.misses, key=found.misses.__getitem__) == "prefill time"


def test_a_span_counts_its_own_arrivals_only(workload: Workload) -> None:
    span = Span(begin_s=20.0, end_s=40.0, warm_up_s=10.0)
    [found] = outcomes(workload, [trial(span=span)], 1)
    inside = sum(20.0 <= row.arrived_s < 40.0 for row in workload.rows)
    assert found.attainment.num_requests == inside > 0


@pytest.mark.long
def test_a_hopeless_run_ends_early_and_is_an_upper_bound(workload: Workload) -> None:
    [whole] = outcomes(workload, [trial(1, 1, speed=8.0)], 1)
    [cut] = outcomes(workload, [trial(1, 1, speed=8.0, give_up_below=0.9)], 1)
    assert whole.share < 0.8 and cut.gave_up and whole.share <= cut.share <= 0.9
    [fine] = outcomes(workload, [trial(8, 4, give_up_below=0.9)], 1)
    assert not fine.gave_up and fine.share > 0.9


def test_what_cannot_run_is_said_by_its_outcome(workload: Workload) -> None:
    small = parse_config("", {"pool": {"dram_tokens_per_instance": 1024}}, DEFAULTS)
    [found] = outcomes(workload, [Trial(small)], 1)
    assert "no instance holds more than" in found.error and found.attainment.num_requests == 0
