"""Tests how long the watch waits for a step before it says that the engine hangs."""

from __future__ import annotations

from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import RunStep, StepEntry
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.worker.engine_thread import SLOWER, DomainNotice, StepWatchdog

COST = FittedCost(prefill=(0.0, 0.01, 0.0, 0.0), decode=(0.01, 0.0, 0.0))
GREEDY = SamplingParams(temperature=0.0)


def step(num_tokens: int, generated: tuple[int, ...] = ()) -> RunStep:
    entry = StepEntry(
        AttemptId("1"), [7] * num_tokens, 0, [BlockId(0)], GREEDY, generated, sends=()
    )
    return RunStep((entry,))


def test_a_short_step_has_the_patience_and_no_more() -> None:
    watch = StepWatchdog(COST, 1, patience_s=5.0)
    watch.begin(step(1, generated=(3,)))
    assert [watch.wait(1.0) for _ in range(5)] == [None] * 5
    assert "6 s" in str(watch.wait(1.0))


def test_a_long_one_has_what_it_needs_on_a_busy_machine_and_of_all_stages() -> None:
    for stages in (1, 3):
        watch = StepWatchdog(COST, stages, patience_s=5.0)
        watch.begin(step(1000))
        assert watch.wait(SLOWER * 10.0 * stages) is None
        assert watch.wait(0.1) is not None


def test_what_is_recomputed_counts_as_a_prompt() -> None:
    watch = StepWatchdog(COST, 1, patience_s=5.0)
    watch.begin(step(1000, generated=(1, 2, 3)))
    assert watch.wait(50.0) is None


def test_each_step_is_waited_for_from_the_end_of_the_one_before() -> None:
    watch = StepWatchdog(COST, 1, patience_s=5.0)
    watch.begin(step(1))
    watch.begin(step(1))
    assert watch.wait(4.0) is None
    watch.end()
    assert watch.wait(4.0) is None
    watch.end()
    assert watch.wait(1e9) is None, "an idle engine does not hang"


def test_the_first_step_beyond_the_measured_ones_is_noted_once() -> None:
    domain = CostDomain(
        prompt_tokens=(1, 100), cached_share=0.5, decode_batch=(1, 4), context_tokens=(1, 50)
    )
    notice = DomainNotice(domain)
    assert notice.of(step(100)) is None
    said = notice.of(step(101))
    assert said is not None and "for a prompt of 101 tokens, the fitted formula" in said
    assert notice.of(step(101)) is None
    assert DomainNotice(None).of(step(10**6)) is None
