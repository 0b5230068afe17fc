"""Tests drafts of an instance's decodes: when decodes have drafts, and how draft tokens are
verified."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    AttemptSpec,
    DropCachedBlocks,
    StartPrefill,
    StepTokens,
)
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded, StepEntry, StepFailed
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.speculation.draft_model import DraftModelPlace
from moonpool.types import FinishReason, Role, SamplingParams, Slo, Token

SIZE, EOS = 16, 1
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=SIZE,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
)
CHEAP_ROWS = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.1, 0.001, 0.0))
"""A cost with slow reads of the weights and cheap rows, as on most machines at small batches."""
DEAR_ROWS = FittedCost(prefill=(0.0, 0.1, 0.0, 0.0), decode=(0.0, 0.1, 0.0))
"""The cost of a saturated machine, on which a row takes the same time in any batch."""
NGRAM = SpeculativeConfig(method="ngram")


class DraftBench:
    """Runs a mixed instance whose model writes `answers[attempt]`, whatever drafts it gets."""

    def __init__(
        self,
        cost: FittedCost = CHEAP_ROWS,
        num_blocks: int = 64,
        draft_model: DraftModelPlace | None = None,
        **config: Any,
    ) -> None:
        config = {"speculative": NGRAM, "learning": False} | config
        self.cost = cost
        self.instance = Instance(
            InstanceConfig(**config),
            LAYOUT,
            num_blocks,
            Role.MIXED,
            cost,
            (EOS,),
            draft_model=draft_model,
        )
        self.answers: dict[str, Sequence[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason | None] = {}
        self.steps: list[RunStep] = []
        self.pending: list[RunStep] = []
        self.seconds = 0.0  # the sum of the times of all steps
        self.slower_s = 0.0  # seconds that are added to steps with drafts

    def start(
        self, name: str, prompt: Sequence[int], answer: Sequence[int], **options: Any
    ) -> None:
        """`options` are options of the attempt. If None, the options of the sampling count."""
        own = {key: options.pop(key) for key in ("tenant", "slo") if key in options}
        self.answers[name], self.got[name] = answer, []
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000} | options)
        work = AttemptSpec(
            attempt_id=AttemptId(name),
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            use_cache=True,
            timeout_s=100.0,
            **{"tenant": "", "slo": Slo(ttft_s=1e9, tbt_s=1e9)} | own,
        )
        self.handle(StartPrefill(attempt=work))

    def handle(self, event: Any) -> None:
        for action in self.instance.handle(event, 0.0):
            if isinstance(action, RunStep):
                self.pending.append(action)
            elif isinstance(action, SendReport) and isinstance(action.report, StepTokens):
                for item in action.report.attempts:
                    self.got[item.attempt_id] += [token.token_id for token in item.tokens]
                    self.finish[item.attempt_id] = item.finish
        self.instance.validate()

    def step(self) -> RunStep:
        """Ends the step in progress like an engine: with the right tokens."""
        step = self.pending.pop(0)
        self.steps.append(step)
        entries, drafted = self.draft(step)
        tokens: list[Token | None] = []
        further: dict[int, tuple[Token, ...]] = {}
        for index, entry in enumerate(entries):
            drawn = self._draw(entry)
            tokens.append(drawn[0] if drawn else None)
            if len(drawn) > 1:
                further[index] = drawn[1:]
        rows = sum(len(entry.new_token_ids) for entry in entries)
        seconds = self.cost.decode_step_s(rows, 0) + step.drafting_s
        if any(entry.num_drafts for entry in entries):
            seconds += self.slower_s
        self.seconds += seconds
        self.handle(StepEnded(tokens, seconds, further=further, drafted=drafted))
        return step

    def draft(self, step: RunStep) -> tuple[Sequence[StepEntry], dict[int, tuple[int, ...]]]:
        """Plays the draft model: returns the entries with its guesses, and the guesses by entry."""
        assert not any(entry.draft_task for entry in step.entries)
        return step.entries, {}

    def _draw(self, entry: StepEntry) -> tuple[Token, ...]:
        if entry.draw is None:
            return ()
        answer, drawn = self.answers[entry.attempt_id], list[Token]()
        for draft in (*entry.drafts, None):
            drawn.append(Token(answer[len(entry.generated) + len(drawn)]))
            if drawn[-1].token_id != draft:
                break
        return tuple(drawn)

    def run(self, most: int = 10_000) -> int:
        """Runs until no work is left; returns the number of steps."""
        begun = len(self.steps)
        while self.pending and len(self.steps) - begun < most:
            self.step()
        return len(self.steps) - begun

    def count(self, name: str) -> int:
        return int(self.instance.counters.get(name, 0))


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 5000) for _ in range(count)]


def test_a_quoted_text_takes_few_steps() -> None:
    quoted = words(100)
    bench = DraftBench()
    bench.start("a", [3, 4, 5, *quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
    steps = bench.run()
    assert bench.got["a"] == [*quoted[2:], EOS] and bench.finish["a"] is FinishReason.STOP
    assert steps < 30
    assert bench.count("accepted_draft_tokens") > 70
    assert bench.count("draft_tokens") >= bench.count("accepted_draft_tokens")
    assert not bench.instance.requests and not bench.instance.pool.num_held


def test_without_the_setting_there_are_none() -> None:
    quoted = words(50)
    bench = DraftBench(speculative=None)
    bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
    assert bench.run() == 49
    assert bench.count("draft_tokens") == 0


def test_a_text_without_repetition_gets_none() -> None:
    bench = DraftBench()
    bench.start("a", words(80, seed=1), [*words(60, seed=2), EOS])
    assert bench.run() == 61
    assert bench.count("draft_tokens") == 0


def test_wrong_drafts_end_and_right_ones_bring_them_back() -> None:
    """In the prompt, 7, 8 are followed by four tokens. The answer has 7, 8 and then other tokens,
    and repeats itself much later."""
    prompt = [7, 8, 50, 51, 52, 53, 9]
    misleading = [x for i in range(60) for x in (7, 8, 1000 + i)]
    bench = DraftBench()
    bench.start("a", prompt, [*misleading, *[70, 71, 72, 73, 74] * 40, EOS])
    while len(bench.got["a"]) < len(misleading):
        bench.step()
    wrong = bench.count("draft_tokens") - bench.count("accepted_draft_tokens")
    assert 0 < wrong < 60
    late = [entry for step in bench.steps[-30:] for entry in step.entries]
    assert sum(entry.num_drafts for entry in late) < 30
    before = len(bench.steps)
    bench.run()
    assert len(bench.steps) - before < 110  # an answer of 201 tokens
    assert bench.got["a"][-1] == EOS


def test_a_saturated_step_has_no_drafts() -> None:
    quoted = words(60)
    for cost, config in ((DEAR_ROWS, {}), (CHEAP_ROWS, {"chunk_tokens": 1})):
        bench = DraftBench(cost, **config)
        bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
        bench.run()
        assert bench.got["a"] == [*quoted[2:], EOS]
        assert bench.count("draft_tokens") == 0


def test_drafts_take_what_chunks_leave_of_the_budget() -> None:
    quoted = words(60)
    bench = DraftBench(chunk_tokens=32, batching="fixed-chunks")
    bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
    bench.run(6)
    bench.start("b", words(70, seed=5), [EOS])
    bench.run()
    assert bench.got["a"] == [*quoted[2:], EOS] and bench.got["b"] == [EOS]
    for step in bench.steps:
        assert sum(len(entry.new_token_ids) for entry in step.entries) <= 32
        if sum(len(entry.new_token_ids) - entry.num_drafts for entry in step.entries) == 32:
            assert not any(entry.num_drafts for entry in step.entries)


def test_steps_that_take_longer_than_predicted_end_the_drafts() -> None:
    quoted = words(800)
    two = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    bench = DraftBench(learning=True, num_blocks=256, speculative=two)
    bench.slower_s = 0.4
    bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS], max_tokens=790)
    bench.run()
    with_drafts = [any(e.num_drafts for e in step.entries) for step in bench.steps]
    assert 0 < sum(with_drafts) < 30
    assert sum(with_drafts[-150:]) <= 2  # a draft is tried again rarely


def test_the_slo_on_the_time_between_tokens_limits_the_drafts() -> None:
    quoted = words(60)
    for tbt_s, most in ((0.5, 4), (0.1215, 2), (0.09, 0)):
        bench = DraftBench()
        slo = Slo(ttft_s=9.0, tbt_s=tbt_s)
        bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS], slo=slo)
        bench.run()
        assert max(entry.num_drafts for step in bench.steps for entry in step.entries) == most


@pytest.mark.parametrize("stop", [{"stop_token_ids": (77,)}, {"max_tokens": 31}], ids=str)
def test_an_answer_ends_where_it_would_without(stop: dict[str, Any]) -> None:
    quoted = [*words(30), 77, *words(30, seed=3)]
    bench = DraftBench()
    bench.start("a", [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS], **stop)
    bench.run()
    end = 29 if "stop_token_ids" in stop else 31
    assert bench.got["a"] == quoted[2 : 2 + end]
    assert bench.finish["a"] is not None


def test_what_cached_blocks_say_came_next() -> None:
    prompt, answer = words(40), [*words(120, seed=8), EOS]
    bench = DraftBench()
    bench.start("first", prompt, answer)
    assert bench.run() == len(answer)
    bench.start("again", prompt, answer)
    assert bench.run() < 60
    assert bench.got["again"] == answer
    accepted = bench.count("accepted_draft_tokens")
    assert accepted > 60
    bench.start("stranger", prompt, answer, tenant="other")
    assert bench.run() == len(answer)
    bench.handle(DropCachedBlocks())
    bench.start("later", prompt, answer)
    assert bench.run() == len(answer)
    assert bench.count("accepted_draft_tokens") == accepted


def test_evicted_blocks_say_nothing() -> None:
    prompt, answer = words(40), [*words(60, seed=8), EOS]
    bench = DraftBench(num_blocks=10)
    bench.start("first", prompt, answer)
    bench.run()
    bench.start("another", words(130, seed=4), [EOS])
    bench.run()
    bench.start("again", prompt, answer)
    assert bench.run() == len(answer)


def test_aborts_and_failed_steps_leave_nothing() -> None:
    quoted = words(60)
    bench = DraftBench()
    for name in ("a", "b"):
        bench.start(name, [*quoted, 6, *quoted[:2]], [*quoted[2:], EOS])
    bench.run(5)
    assert any(entry.num_drafts for entry in bench.pending[0].entries)
    bench.handle(Abort(attempt_id=AttemptId("a")))
    bench.step()
    bench.pending.pop(0)
    bench.handle(StepFailed("broken"))
    assert not bench.instance.requests and not bench.instance.pool.num_held


def check_any_answers(bench: DraftBench, rng: random.Random, most_words: int) -> None:
    """Random requests come while others run. All answers must be complete, and no block may stay
    held."""
    expected: dict[str, list[int]] = {}
    for number in range(5):
        prompt = [rng.randrange(2, 5) for _ in range(rng.randrange(1, 50))]
        answer = [rng.randrange(2, most_words) for _ in range(rng.randrange(1, 60))]
        most = rng.randrange(1, 70)
        bench.start(str(number), prompt, [*answer, EOS], max_tokens=most)
        expected[str(number)] = [*answer, EOS][:most]
        bench.run(rng.randrange(20))
    bench.run()
    assert bench.got == expected
    assert not bench.instance.requests and not bench.instance.pool.num_held


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_any_answers_under_any_pressure_are_whole(seed: int) -> None:
    """There are few blocks, so that requests are preempted, and texts have few words, so that
    drafts are frequent."""
    rng = random.Random(seed)
    bench = DraftBench(
        num_blocks=rng.choice([9, 14, 60]),
        chunk_tokens=rng.choice([4, 20, 512]),
        speculative=SpeculativeConfig(
            method="ngram", num_speculative_tokens=rng.randint(1, 6), prompt_lookup_min=1
        ),
        prefix_caching=rng.random() < 0.7,
    )
    check_any_answers(bench, rng, 5)
