"""Tests repeated steps of decodes, several steps at a time, and room in the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    BlocksChanged,
    DecodeAccepted,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    StepTokens,
)
from moonpool.protocol.transfer_events import ReceiveEnded
from moonpool.scheduler.actions import (
    RunStep,
    SendReport,
    StepEnded,
    StepFailed,
    StepsEnded,
    StopRepeating,
    WorkerAction,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import BlockKey, Role, SamplingParams, Slo, Token
from moonpool_lab.solo import solo_attempt

SIZE, EOS = 16, 1
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=SIZE,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
)
COST = FittedCost(prefill=(0.01, 0.001, 0.0, 0.0), decode=(0.01, 0.001, 0.0))


class Bench:
    """Holds a mixed instance and its steps in progress."""

    def __init__(self, num_blocks: int = 32, **config: Any) -> None:
        self.instance = Instance(
            InstanceConfig(**config), LAYOUT, num_blocks, Role.MIXED, COST, (EOS,)
        )
        self.steps: list[RunStep] = []
        self.reports: list[Any] = []

    def handle(self, event: Any) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        self.steps += [a for a in actions if isinstance(a, RunStep)]
        self.reports += [a.report for a in actions if isinstance(a, SendReport)]
        return actions

    def start(self, name: str, num_tokens: int, keys: Any = None, max_tokens: int = 50) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        work = solo_attempt(name, range(num_tokens), sampling, keys=keys)
        self.handle(StartPrefill(attempt=work))

    def end(self) -> list[WorkerAction]:
        """Ends the oldest step, which draws token 7 for every request."""
        step = self.steps.pop(0)
        tokens = tuple(None if e.draw is None else Token(7) for e in step.entries)
        return self.handle(StepEnded(tokens, 0.01))

    def end_repeated(self, *tokens: list[int]) -> list[WorkerAction]:
        self.steps.pop(0)
        return self.handle(StepsEnded([tuple(map(Token, ids)) for ids in tokens], 0.3))

    def works_of(self, step: RunStep) -> dict[str, tuple[int, int]]:
        return {e.attempt_id: (e.start, len(e.new_token_ids)) for e in step.entries}


def test_decodes_alone_may_be_repeated_until_an_answer_must_end() -> None:
    bench = Bench(max_repeats=100)
    bench.start("a", 20, max_tokens=9)
    assert bench.steps[0].max_repeats == 1, "a prefill runs once"
    bench.end()
    (step,) = bench.steps
    assert step.max_repeats == 8
    bench.end_repeated([7, 8, 9])
    told = bench.reports[-1]
    assert isinstance(told, StepTokens) and told.gap_s == pytest.approx(0.1)
    assert [t.token_id for t in told.attempts[0].tokens] == [7, 8, 9]
    assert bench.works_of(bench.steps[0]) == {"a": (23, 1)} and bench.steps[0].max_repeats == 5
    bench.end_repeated([7, EOS])
    assert bench.reports[-1].attempts[0].finish is not None
    assert not bench.instance.requests and bench.instance.pool.owners() == {}


def test_blocks_for_all_repetitions_are_held_before_they_begin() -> None:
    bench = Bench(num_blocks=4, max_repeats=1000)
    bench.start("a", 20, max_tokens=1000)
    bench.end()
    repeats = bench.steps[0].max_repeats
    held = bench.instance.pool.named_owners()["work:a"]
    assert repeats > 1 and LAYOUT.blocks_for(21 + repeats - 1) <= held <= 4


def test_a_new_request_stops_the_repetition_and_joins() -> None:
    bench = Bench(max_repeats=100)
    bench.start("a", 20)
    bench.end()
    actions = bench.handle(StartPrefill(attempt=_work("b", 30)))
    assert [type(a) for a in actions if isinstance(a, StopRepeating)] == [StopRepeating]
    assert len(bench.steps) == 1, "the first step is still in progress"
    bench.end_repeated([7, 7])
    assert bench.works_of(bench.steps[0]) == {"a": (22, 1), "b": (0, 30)}
    assert bench.steps[0].max_repeats == 1


def test_an_aborted_request_stops_the_repetition_and_keeps_its_blocks() -> None:
    bench = Bench(max_repeats=100)
    bench.start("a", 20)
    bench.end()
    actions = bench.handle(Abort(attempt_id=AttemptId("a")))
    assert any(isinstance(a, StopRepeating) for a in actions)
    assert bench.instance.pool.named_owners()["work:a"] > 0
    bench.end_repeated([7])
    assert bench.instance.pool.owners() == {} and not bench.steps


def test_chunks_of_a_prompt_follow_each_other_in_a_pipeline() -> None:
    bench = Bench(max_steps_in_flight=3, chunk_tokens=16)
    bench.start("a", 70)
    assert [bench.works_of(s) for s in bench.steps] == [
        {"a": (0, 16)},
        {"a": (16, 16)},
        {"a": (32, 16)},
    ]
    bench.end()
    assert bench.works_of(bench.steps[-1]) == {"a": (48, 16)}
    bench.start("b", 5)
    bench.end()
    assert bench.works_of(bench.steps[-1]) == {"a": (64, 6), "b": (0, 5)}
    for _ in range(3):
        bench.end()
    assert bench.works_of(bench.steps[-1]) == {"a": (70, 1), "b": (5, 1)}
    assert len(bench.steps) == 1, "a decode waits for its token before the next"


def decodes_of(bench: Bench) -> list[int]:
    return [len(step.entries) for step in bench.steps]


def test_decodes_are_shared_out_evenly_among_the_stages() -> None:
    bench = Bench(max_steps_in_flight=3, micro_batches=2, chunk_tokens=64)
    for name in "abcde":
        bench.start(name, 5)
    while any(len(e.new_token_ids) > 1 for s in bench.steps for e in s.entries):
        bench.end()
    assert sorted(decodes_of(bench)) == [2, 3], "one step per stage, and no third"
    bench.start("f", 5)  # the prompt takes the third place, and no decodes are left for it
    assert [e.attempt_id for e in bench.steps[-1].entries] == ["f"]
    for _ in range(4):
        bench.end()
    assert decodes_of(bench) == [3, 3]


def test_uneven_micro_batches_become_even_again() -> None:
    bench = Bench(max_steps_in_flight=3, micro_batches=2, chunk_tokens=64)
    for name in "abcdef":
        bench.start(name, 5)
    for _ in range(6):
        bench.end()
    assert decodes_of(bench) == [3, 3]
    for entry in bench.steps[0].entries[:2]:
        bench.handle(Abort(attempt_id=entry.attempt_id))
    for _ in range(3):
        bench.end()
    assert decodes_of(bench) == [2, 2]


def test_the_time_of_steps_counts_for_one_stage() -> None:
    """Two steps are in progress at a time, so the sum of their times is twice the elapsed time."""
    bench = Bench(max_steps_in_flight=3, micro_batches=2, chunk_tokens=64)
    bench.start("a", 5)
    bench.end()
    assert bench.instance.counters["step_s"] == pytest.approx(0.005)


def test_steps_of_one_stage_take_all_decodes() -> None:
    bench = Bench(chunk_tokens=64)
    for name in "abcde":
        bench.start(name, 5)
    bench.end()
    bench.end()
    assert decodes_of(bench) == [5]


def test_failed_steps_of_a_pipeline_leave_no_blocks_held() -> None:
    bench = Bench(max_steps_in_flight=2, chunk_tokens=16)
    bench.start("a", 70)
    for _ in range(2):
        bench.steps.pop(0)
        bench.handle(StepFailed("it broke"))
    assert [r for r in bench.reports if isinstance(r, AttemptFailed)]
    assert bench.instance.pool.owners() == {} and not bench.steps


def test_blocks_have_only_the_keys_that_came_with_the_request() -> None:
    keys = tuple(BlockKey(bytes([n]) * 16) for n in range(2))
    bench = Bench()
    bench.start("a", 40, keys=keys)
    bench.end()
    stored = [k for r in bench.reports if isinstance(r, BlocksChanged) for k in r.stored]
    assert sorted(stored) == sorted(keys)
    for _ in range(40):
        bench.end()
    stored = [k for r in bench.reports if isinstance(r, BlocksChanged) for k in r.stored]
    assert sorted(stored) == sorted(keys), "generated blocks have no key"
    bench.start("b", 40, keys=keys)
    bench.end()
    assert bench.works_of(bench.steps[-1])["b"] == (32, 8)


def _work(name: str, num_tokens: int) -> AttemptSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    return solo_attempt(name, range(num_tokens), sampling, use_cache=False)


def test_requests_wait_for_room_in_the_engine() -> None:
    bench = Bench(engine_tokens=60, chunk_tokens=100)
    bench.start("a", 40, max_tokens=3)
    bench.start("b", 30)
    bench.start("c", 10)
    bench.end()
    assert bench.works_of(bench.steps[-1]) == {"a": (40, 1)}, "c does not pass b"
    bench.end()
    bench.end()
    assert bench.works_of(bench.steps[-1]) == {"b": (16, 14), "c": (0, 10)}, "a block is cached"
    alone = Bench(engine_tokens=60, chunk_tokens=100)
    alone.start("a", 70)
    assert alone.works_of(alone.steps[-1]) == {"a": (0, 70)}, "alone, it is let in"


def test_received_requests_wait_for_room_in_the_engine_in_order() -> None:
    config = InstanceConfig(engine_tokens=60)
    instance = Instance(config, LAYOUT, 32, Role.DECODE, COST, (EOS,))
    begun: list[dict[str, int]] = []
    accepted: list[str] = []

    def handle(event: Any) -> None:
        for action in instance.handle(event, 0.0):
            if isinstance(action, RunStep):
                begun.append({e.attempt_id: e.start for e in action.entries})
            if isinstance(action, SendReport) and isinstance(action.report, DecodeAccepted):
                accepted.append(action.report.attempt_id)
        instance.validate()

    unlimited = Slo(ttft_s=float("inf"), tbt_s=float("inf"))
    for name, num_tokens in (("a", 40), ("b", 30), ("c", 10)):
        work = msgspec.structs.replace(_work(name, num_tokens), slo=unlimited)
        handle(ReserveDecode(attempt=work))
        handle(ReceiveEnded(stream_id=name))
        handle(StartDecode(attempt_id=AttemptId(name), token=Token(7)))
    handle(StepEnded((Token(7),), 0.01))
    assert begun == [{"a": 40}, {"a": 41}], "b waits, and c behind it"
    assert accepted == ["a"], "a first token is shown when the decode runs"
    handle(Abort(attempt_id=AttemptId("b")))
    handle(StepEnded((Token(7),), 0.01))
    assert begun[-1] == {"a": 42, "c": 10} and accepted == ["a", "c"]
    handle(Abort(attempt_id=AttemptId("a")))
    handle(Abort(attempt_id=AttemptId("c")))
    handle(StepEnded((Token(7), Token(7)), 0.01))
    assert not instance.requests and instance.pool.owners() == {}


def refused_late(tolerance: float, tbt_s: float = 10.0) -> list[AttemptFailed]:
    """Returns the reports of a decode instance for two requests of 41 and 31 tokens, with room for
    60 in its engine."""
    config = InstanceConfig(engine_tokens=60)
    instance = Instance(config, LAYOUT, 32, Role.DECODE, COST, (EOS,))
    told = []
    for name, num_tokens in (("a", 40), ("b", 30)):
        work = msgspec.structs.replace(
            _work(name, num_tokens), tolerance=tolerance, slo=Slo(ttft_s=10.0, tbt_s=tbt_s)
        )
        instance.handle(ReserveDecode(attempt=work), 0.0)
        instance.handle(ReceiveEnded(stream_id=name), 0.0)
        told += instance.handle(StartDecode(attempt_id=AttemptId(name), token=Token(7)), 0.0)
    reports = [action.report for action in told if isinstance(action, SendReport)]
    return [report for report in reports if isinstance(report, AttemptFailed)]


def test_a_decode_with_an_slo_fails_if_the_engine_has_no_room() -> None:
    (failed,) = refused_late(tolerance=1.0)
    assert (failed.attempt_id, failed.reason) == ("b", "tbt_slo") and "71 tokens" in failed.message


def test_the_second_check_tolerates_more_than_the_first() -> None:
    assert refused_late(tolerance=1.18), "71 of 60 tokens"
    assert not refused_late(tolerance=1.2)
    step_s = COST.decode_step_s(2, 72)
    assert not refused_late(tolerance=1.2, tbt_s=step_s / 1.15)
    (failed,) = refused_late(tolerance=1.2, tbt_s=step_s / 1.25)
    assert "time between tokens" in failed.message


def test_a_joining_request_takes_the_place_of_a_preempted_one() -> None:
    """If all blocks are held, the running request preempts itself. The other request must then
    run."""
    instance = Instance(
        InstanceConfig(engine_tokens=3 * SIZE, prefix_caching=False),
        LAYOUT,
        5,
        Role.DECODE,
        COST,
        (EOS,),
    )
    unlimited = Slo(ttft_s=float("inf"), tbt_s=float("inf"))
    running: list[set[str]] = []

    def handle(event: Any) -> None:
        for action in instance.handle(event, 0.0):
            if isinstance(action, RunStep):
                running.append({e.attempt_id for e in action.entries})
        instance.validate()

    for name, num_tokens in (("a", 2 * SIZE - 1), ("b", 2 * SIZE)):
        work = msgspec.structs.replace(_work(name, num_tokens), slo=unlimited)
        handle(ReserveDecode(attempt=work))
        handle(ReceiveEnded(stream_id=name))
        handle(StartDecode(attempt_id=AttemptId(name), token=Token(7)))
    assert running == [{"a"}], "the engine has no room for b"
    handle(StepEnded((Token(7),), 0.01))
    assert running[-1] == {"b"}, "a lacks a block and is preempted"
