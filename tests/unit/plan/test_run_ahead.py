"""Tests that trials that run ahead of the search change neither its outcomes nor its number of
runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.plan.bounds import Bounds
from moonpool.plan.search import Planner
from moonpool.plan.simulation_pool import SimulationPool
from moonpool.plan.trial import Outcome, Trial, Workload
from moonpool.sim.defaults import DEFAULTS
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from tests.unit.plan.made_up import MadeUpWorkforce, Truth
from tests.unit.plan.test_search import MadeUpBounds, assessor, prepared, priced, truth


@pytest.fixture(scope="module")
def workload() -> Workload:
    rows = tuple(generate(BUILT_IN["conversation"], num_requests=60, seed=3))
    return Workload(rows, BLOCK_TOKENS)


def trial(prefill: int, speed: float = 1.0) -> Trial:
    cluster = {"cluster": {"prefill": prefill, "decode": 1}}
    config = parse_config("", cluster, DEFAULTS)
    return msgspec.structs.replace(Trial(config), speed=speed)


@pytest.mark.long
def test_what_ran_ahead_counts_once_it_is_asked_for(workload: Workload) -> None:
    first, second, third = trial(1), trial(2), trial(3)
    with SimulationPool(workload, 1) as alone:
        expected = alone.run([first, second, third])
    with SimulationPool(workload, 2) as pool_of_runs:
        told: list[int] = []
        assert pool_of_runs.run([first], told.append, ahead=[second, first]) == expected[:1]
        assert pool_of_runs.num_run == 1 and told == [1]
        assert pool_of_runs.run([second], told.append, ahead=[third]) == expected[1:2]
        assert pool_of_runs.num_run == 2 and told == [1, 1]
        # Both processes may be busy with trials ahead. One of these trials is stopped.
        assert pool_of_runs.run([third, trial(4)], ahead=[trial(5)])[0] == expected[2]
        assert pool_of_runs.num_run == 4


@pytest.mark.long
def test_a_trial_ahead_gives_way_and_can_run_again(workload: Workload) -> None:
    long = [trial(1, speed=0.5 + number / 100) for number in range(2)]
    with SimulationPool(workload, 1) as alone:
        expected = alone.run(long)
    with SimulationPool(workload, 2) as pool_of_runs:
        for number in range(4):  # each call stops the trial that runs ahead, whatever its state
            pool_of_runs.run([trial(2, speed=1 + number), trial(3, speed=1 + number)], ahead=long)
        assert pool_of_runs.run(long) == expected
        assert pool_of_runs.num_run == 10


class Recorder(MadeUpWorkforce):
    """Records what would run ahead."""

    def __init__(self, of: Truth) -> None:
        super().__init__(of)
        self.ahead: set[Trial] = set()
        self.guessed = 0
        self.serial = 0

    def run(
        self,
        trials: Sequence[Trial],
        tell: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
        ahead: Sequence[Trial] = (),
    ) -> list[Outcome]:
        if len(trials) == 1 and trials[0] not in self._known:
            self.serial += 1
            self.guessed += trials[0] in self.ahead
        self.ahead.update(ahead[:1])
        return super().run(trials, tell, stop)


def test_the_search_says_what_it_will_probably_ask_for() -> None:
    """For many simulations that the search waits for, it had announced before that they should run
    ahead first, so that a second process could run them."""
    guessed = serial = 0
    for prefill, decode in ((3.0, 2.0), (2.2, 4.1), (5.0, 1.5)):
        pool_of_runs = Recorder(truth(prefill, decode))
        planner = Planner(
            assessor(pool_of_runs, priced()), prepared(), cast(Bounds, MadeUpBounds())
        )
        assert planner.plan().choice is not None
        guessed += pool_of_runs.guessed
        serial += pool_of_runs.serial
    assert serial > 10 and guessed > serial / 4
