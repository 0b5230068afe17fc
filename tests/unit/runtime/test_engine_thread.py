"""The engine's thread: a mirror learns of arriving blocks in the order of the actions, and the
messenger of the blocks that a step is about to write."""

from __future__ import annotations

import queue
from typing import Any, cast

from moonpool.engine.runner import Engine
from moonpool.engine.step import StepResult
from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.messenger import Messenger
from moonpool.runtime.engine_thread import EngineThread
from moonpool.types import BlockId, InstanceId, SamplingParams, Token
from moonpool.workers.actions import (
    ExpectStream,
    FetchBlocks,
    FinishStream,
    RunStep,
    StepEnded,
    StepEntry,
)
from moonpool.workers.messages import WorkId

STEP = [("writing", (3,), 0, 1), "step"]
PEER = PeerAddress(InstanceId("p"), "host", "", "127.0.0.1", 1)


class Recorder:
    """An engine and its mirror: writes down what it is told."""

    def __init__(self, mirrored: bool) -> None:
        self.heard: list[Any] = []
        self.mirror = self if mirrored else None

    def forget_sums(self, block_ids: Any, first_token: int, end_token: int) -> None:
        self.heard.append(("writing", block_ids, first_token, end_token))

    def arriving(self, block_ids: Any) -> None:
        self.heard.append(list(block_ids))

    def step(self, sequences: Any, on_layer: Any, before_attend: Any) -> StepResult:
        self.heard.append("step")
        return StepResult([Token(1)], 0.0)


def heard_by(mirrored: bool) -> list[Any]:
    recorder, ended = Recorder(mirrored), queue.SimpleQueue[Any]()
    engine, messenger = cast(Engine, recorder), cast(Messenger, recorder)
    thread = EngineThread(engine, messenger, (), 1, ended.put)
    entry = StepEntry(WorkId("w"), (5,), 0, (BlockId(3),), SamplingParams(), (), ())
    thread.start()
    thread.before_transfer(FetchBlocks("f", PEER, (), (BlockId(7), BlockId(8)), 1.0))
    thread.submit(RunStep((entry,)))
    thread.before_transfer(FinishStream("s"))
    thread.before_transfer(ExpectStream("s", (BlockId(2),), 0, 1.0))
    thread.submit(RunStep((entry,)))
    outcomes = [ended.get(timeout=10) for _ in range(2)]
    thread.stop(10.0)
    assert all(isinstance(outcome, StepEnded) for outcome in outcomes)
    return recorder.heard


def test_arrivals_come_before_the_steps_submitted_after_them() -> None:
    assert heard_by(mirrored=True) == [[7, 8], *STEP, [2], *STEP]


def test_an_engine_that_works_in_the_arena_hears_of_no_arrivals() -> None:
    assert heard_by(mirrored=False) == [*STEP, *STEP]
