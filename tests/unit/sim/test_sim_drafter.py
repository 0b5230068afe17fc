"""Tests the simulated draft model: its rounds of guesses, their time, and which guesses are
right."""

from __future__ import annotations

import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import DraftTask, StepEntry
from moonpool.sim.drafter import Acceptance, SimDrafter
from moonpool.types import BlockId, SamplingParams

COST = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.01, 0.001, 1e-6))
ALWAYS, NEVER = Acceptance(1.0), Acceptance(0.0)


def entry(name: str, context: int, generated: int, task: DraftTask | None) -> StepEntry:
    blocks, greedy = [BlockId(0)], SamplingParams(temperature=0.0)
    made = StepEntry(AttemptId(name), [0], context, blocks, greedy, [0] * generated)
    return made._replace(draft_task=task)


def task(start: int, number: int, num_drafts: int) -> DraftTask:
    return DraftTask(range(number), start, [0], num_drafts)


def test_every_round_is_a_step_of_the_requests_that_still_guess() -> None:
    drafter = SimDrafter(COST, NEVER, lambda attempt_id: 100)
    entries = (
        entry("0/0", 499, 3, task(498, 2, 3)),
        entry("1/0", 99, 3, None),
        entry("2/0", 199, 3, task(199, 1, 1)),
        entry("3/0", 799, 3, task(300, 64, 0)),
    )
    changed, drafted, seconds = drafter.run(entries)
    assert [each.num_drafts for each in changed] == [3, 0, 1, 0]
    assert drafted == {0: (0, 0, 0), 2: (0,), 3: ()}
    assert not any(each.draft_task for each in changed)
    first_s = COST.step_s([Chunk(64, 300, 300, True)], 3, 500 + 200)
    rest_s = COST.step_s((), 1, 501) + COST.step_s((), 1, 502)
    assert seconds == pytest.approx(first_s + rest_s)


def test_a_right_guess_of_the_end_is_the_last_and_is_not_handed_on() -> None:
    last_two = entry("0/0", 99, 8, task(99, 1, 4))
    _, drafted, seconds = SimDrafter(COST, ALWAYS, lambda attempt_id: 10).run((last_two,))
    assert drafted == {0: (0,)}  # the second guess was the end of the answer
    assert seconds == pytest.approx(COST.step_s((), 1, 100) + COST.step_s((), 1, 101))
    _, drafted, _ = SimDrafter(COST, NEVER, lambda attempt_id: 10).run((last_two,))
    assert drafted == {0: (0, 0, 0, 0)}  # the drafts do not fit, because the text is another one


def test_a_guess_depends_on_seed_request_and_place_alone() -> None:
    def pattern(name: str, seed: int, probability: float = 0.6) -> list[bool]:
        acceptance = Acceptance(probability, seed)
        return [acceptance.right(AttemptId(name), place) for place in range(4000)]

    assert pattern("7/0", 1) == pattern("7/3", 1)
    assert pattern("7/0", 1) != pattern("7/0", 2)
    assert pattern("7/0", 1) != pattern("8/0", 1)
    assert sum(pattern("7/0", 1)) / 4000 == pytest.approx(0.6, abs=0.03)
    assert all(pattern("7/0", 1, 1.0)) and not any(pattern("7/0", 1, 0.0))
