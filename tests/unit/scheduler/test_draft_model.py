"""Tests the draft model of an instance: its tasks, their blocks, and their times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import Abort, AttemptId
from moonpool.scheduler.actions import DraftTask, RunStep, StepEntry, StepFailed
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool.types import FinishReason, Slo
from tests.unit.scheduler.test_speculation import (
    CHEAP_ROWS,
    EOS,
    SIZE,
    DraftBench,
    check_any_answers,
    words,
)

BY_MODEL = SpeculativeConfig(
    method="draft_model", model="small", prompt_lookup_min=32, prompt_lookup_max=32
)
"""Disables the lookups, so that all drafts come from the model."""
TENTH = FittedCost(prefill=(0.0, 0.0001, 0.0, 0.0), decode=(0.01, 0.0001, 0.0))
"""A tenth of the price of `CHEAP_ROWS`."""
HALF = FittedCost(prefill=(0.0, 0.0005, 0.0, 0.0), decode=(0.05, 0.0005, 0.0))


class ModelBench(DraftBench):
    """Runs a mixed instance with a draft model. A guess is right if `right(position)` is true.

    The model keeps the tokens of its KVCache by block, and checks that the tokens before each task
    are the request's. With other tokens, a real draft model would guess badly and nobody would
    notice.
    """

    def __init__(
        self,
        right: Callable[[int], bool],
        draft_cost: FittedCost = TENTH,
        draft_blocks: int = 64,
        max_positions: int = 10_000,
        **options: Any,
    ) -> None:
        place = DraftModelPlace(draft_cost, draft_blocks, SIZE, max_positions)
        super().__init__(draft_model=place, **{"speculative": BY_MODEL} | options)
        self.right, self.draft_blocks, self.broken = right, draft_blocks, False
        self.prompts: dict[str, Sequence[int]] = {}
        self.held: dict[tuple[int, int], int] = {}  # maps (block, row) to the token
        self.most_computed = 0  # the most tokens that one task computed

    def start(
        self, name: str, prompt: Sequence[int], answer: Sequence[int], **options: Any
    ) -> None:
        self.prompts[name] = prompt
        super().start(name, prompt, answer, **options)

    def draft(self, step: RunStep) -> tuple[Sequence[StepEntry], dict[int, tuple[int, ...]]]:
        if self.broken:
            return [entry.with_drafts(()) for entry in step.entries], {}
        drafted: dict[int, tuple[int, ...]] = {}
        used: set[int] = set()
        for index, entry in enumerate(step.entries):
            if entry.draft_task is not None:
                assert used.isdisjoint(entry.draft_task.block_ids)
                used.update(entry.draft_task.block_ids)
                drafted[index] = self._guess(entry, entry.draft_task)
        assert len(used) <= self.draft_blocks and all(0 <= b < self.draft_blocks for b in used)
        entries = [
            entry.with_drafts(drafted[index]) if index in drafted else entry
            for index, entry in enumerate(step.entries)
        ]
        return entries, drafted

    def _guess(self, entry: StepEntry, task: DraftTask) -> tuple[int, ...]:
        text = [*self.prompts[entry.attempt_id], *self.answers[entry.attempt_id]]
        rows = [(block, row) for block in task.block_ids for row in range(SIZE)]
        assert [self.held[row] for row in rows[: task.start]] == text[: task.start]
        end = task.start + len(task.token_ids)
        assert list(task.token_ids) == text[task.start : end]
        assert end == entry.start + 1 or not task.num_drafts
        self.most_computed = max(self.most_computed, len(task.token_ids))
        self.held |= dict(zip(rows[task.start : end], task.token_ids, strict=True))
        found: list[int] = []
        for position in range(end, min(end + task.num_drafts, len(text))):
            token_id = text[position] if self.right(position) else 9
            if token_id in task.end_token_ids:
                break
            found.append(token_id)
            if len(found) < task.num_drafts:
                self.held[rows[position]] = token_id
        return tuple(found)


def always(position: int) -> bool:
    return True


def never(position: int) -> bool:
    return False


def test_a_draft_model_that_is_right_takes_few_steps() -> None:
    bench = ModelBench(always)
    answer = [*words(200, seed=2), EOS]
    bench.start("a", words(80), answer)
    steps = bench.run()
    assert bench.got["a"] == answer and bench.finish["a"] is FinishReason.STOP
    assert steps < 50
    assert bench.count("accepted_draft_tokens") == bench.count("draft_tokens") > 150
    plain = DraftBench(speculative=None)
    plain.start("a", words(80), answer)
    plain.run()
    assert bench.seconds < 0.5 * plain.seconds


def test_one_that_is_wrong_is_switched_off_and_tried_out_rarely() -> None:
    bench = ModelBench(never, draft_cost=HALF)
    for number in range(4):
        answer = words(600, seed=number)
        bench.start(str(number), words(40, seed=90 + number), answer, max_tokens=600)
        bench.run()
        assert bench.got[str(number)] == answer
    assert bench.count("accepted_draft_tokens") == 0
    asked = [any(entry.draft_task for entry in step.entries) for step in bench.steps]
    assert 0 < sum(asked[:600]) < 20  # a few, because the first request has to learn the acceptance
    assert 0 < sum(asked[600:]) < 40
    plain_s = sum(CHEAP_ROWS.decode_step_s(1, 0) for _ in range(2400))
    assert bench.seconds < 1.06 * plain_s


def test_one_that_becomes_right_comes_back() -> None:
    changed = 700
    bench = ModelBench(lambda position: position >= changed, HALF, draft_blocks=300, num_blocks=300)
    answer = words(2000, seed=3)
    bench.start("a", words(20), answer, max_tokens=2000)
    while len(bench.got["a"]) < changed:
        bench.step()
    before = len(bench.steps)
    bench.run()
    assert bench.got["a"] == answer
    assert len(bench.steps) - before < 600  # far fewer steps than the 1,300 tokens of the context


def test_one_that_costs_as_much_as_the_model_never_pays() -> None:
    bench = ModelBench(always, draft_cost=CHEAP_ROWS)
    answer = words(300, seed=1)
    bench.start("a", words(10), answer, max_tokens=300)
    bench.run()
    assert bench.got["a"] == answer
    assert sum(any(e.draft_task for e in step.entries) for step in bench.steps) < 10


def test_its_own_time_is_part_of_the_price() -> None:
    """Guesses are right in 7 of 10 places, so the draft model pays only at a tenth of the price."""
    drafts = []
    for cost in (TENTH, CHEAP_ROWS):
        bench = ModelBench(lambda position: position % 10 < 7, draft_cost=cost)
        bench.start("a", words(10), words(400, seed=1), max_tokens=400)
        bench.run()
        drafts.append(bench.count("draft_tokens"))
    assert drafts[0] > 150 and drafts[1] < 15


def test_a_long_prompt_is_computed_in_chunks_and_only_if_that_pays() -> None:
    bench = ModelBench(always, chunk_tokens=64)
    bench.start("a", words(500), words(200, seed=1), max_tokens=200)
    bench.run()
    assert bench.most_computed == 64
    assert bench.count("accepted_draft_tokens") > 100
    bench = ModelBench(always, chunk_tokens=64)
    bench.start("a", words(500), words(5, seed=1), max_tokens=5)
    bench.run()
    assert bench.count("draft_tokens") == 0


def test_the_slo_limits_the_chunks() -> None:
    slo = Slo(ttft_s=9.0, tbt_s=0.14)  # 85 % of this SLO leave 18 ms besides a decode
    bench = ModelBench(always, chunk_tokens=512)
    bench.start("a", words(300), words(200, seed=1), max_tokens=200, slo=slo)
    bench.run()
    assert 8 <= bench.most_computed <= 180


def test_a_text_beyond_its_context_goes_on_without() -> None:
    bench = ModelBench(always, max_positions=100)
    answer = words(200, seed=1)
    bench.start("a", words(50), answer, max_tokens=200)
    bench.run()
    assert bench.got["a"] == answer
    assert 0 < bench.count("draft_tokens") < 60


def test_more_requests_than_its_memory_holds() -> None:
    bench = ModelBench(always, draft_blocks=12, num_blocks=200)
    answers = {str(number): words(60, seed=number) for number in range(8)}
    for name, answer in answers.items():
        bench.start(name, words(40), answer, max_tokens=60)
    bench.run()
    assert bench.got == answers
    assert bench.count("accepted_draft_tokens") > 60


def test_drafts_end_before_a_token_that_may_end_the_answer() -> None:
    answer = [*words(30, seed=4), 77, *words(30, seed=5)]
    bench = ModelBench(always)
    bench.start("a", words(20), answer, stop_token_ids=(77,))
    bench.run()
    assert bench.got["a"] == answer[:31]


def test_after_a_failure_the_instance_goes_on_without() -> None:
    bench = ModelBench(always)
    answer = words(100, seed=4)
    bench.start("a", words(20), answer, max_tokens=100)
    bench.run(10)
    drafts = bench.count("draft_tokens")
    bench.broken = True
    bench.run()
    assert bench.got["a"] == answer and drafts > 0
    assert bench.count("draft_tokens") == drafts
    assert not any(entry.draft_task for step in bench.steps[-50:] for entry in step.entries)


def test_aborts_and_failed_steps_give_its_blocks_back() -> None:
    bench = ModelBench(always, draft_blocks=8)
    for _ in range(3):
        for name in ("a", "b"):
            bench.start(name, words(40), words(100), max_tokens=100)
        bench.run(5)
        assert any(entry.draft_task for entry in bench.pending[0].entries)
        bench.handle(Abort(attempt_id=AttemptId("a")))
        bench.step()
        bench.pending.pop(0)
        bench.handle(StepFailed("broken"))
        assert not bench.instance.requests
    bench.start("c", words(100), words(20), max_tokens=20)
    bench.run()
    assert bench.got["c"] == words(20)


def test_free_drafts_are_taken_where_they_are_as_often_right() -> None:
    """The draft model is never right, and lookups are, because the text repeats itself."""
    both = SpeculativeConfig(method="draft_model", model="small")
    quoted = words(100)
    bench = ModelBench(never, speculative=both)
    bench.start("a", [3, 4, 5, *quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
    assert bench.run() < 40
    assert bench.count("accepted_draft_tokens") > 60


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_any_answers_under_any_pressure_are_whole(share: float, seed: int) -> None:
    """There are few blocks of both kinds, so that requests are preempted and take blocks from each
    other."""
    rng = random.Random(seed)
    hits = [rng.random() < share for _ in range(200)]
    bench = ModelBench(
        lambda position: hits[position],
        draft_blocks=rng.choice([1, 5, 12, 64]),
        num_blocks=rng.choice([9, 14, 60]),
        chunk_tokens=rng.choice([4, 20, 512]),
        speculative=SpeculativeConfig(
            method="draft_model",
            model="small",
            num_speculative_tokens=rng.randint(1, 6),
            prompt_lookup_min=1,
        ),
        prefix_caching=rng.random() < 0.7,
    )
    check_any_answers(bench, rng, 9)
