"""Tests the engine's thread, with one or several stages: the GPU's copy learns of arriving blocks
in the order of the actions, and the messenger learns which blocks a step is about to write."""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

import pytest

from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import (
    ExpectStream,
    FetchBlocks,
    FinishStream,
    RunStep,
    StepEnded,
    StepEntry,
)
from moonpool.text.grammar import Grammars
from moonpool.text.tokenizer import Vocabulary
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import BlockId, InstanceId, SamplingParams, Token
from moonpool_engine.engine.step import StepResult
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.worker import engine_thread
from moonpool_engine.worker.engine_thread import EngineThread, PipelineThread

STEP = [("writing", (3,), 0, 1), "step"]
BYTES = ByteTokenizer(259)
PEER = PeerAddress(InstanceId("p"), "host", "", "127.0.0.1", 1)


class Recorder:
    """An engine and its mirror: records its calls."""

    def __init__(self, mirrored: bool) -> None:
        self.heard: list[Any] = []
        self.host_sync = self if mirrored else None
        self.grammars = Grammars(self.vocabulary, 259, [BYTES.eos_token_ids[0]])

        self.has_read = threading.Event()

    def vocabulary(self) -> Vocabulary:
        self.heard.append("vocabulary")
        self.has_read.set()
        return BYTES

    def forget_checksums(self, block_ids: Any, first_token: int, end_token: int) -> None:
        self.heard.append(("writing", block_ids, first_token, end_token))

    def arriving(self, block_ids: Any) -> None:
        self.heard.append(list(block_ids))

    def step(self, sequences: Any, on_layer: Any, before_attend: Any) -> StepResult:
        self.heard.append("step")
        return StepResult([Token(1)], 0.0)

    # As the first of several stages:

    cores = ()

    def begin(self, sequences: Any, on_layer: Any, on_end: Any) -> None:
        on_end(self.step(sequences, on_layer, None))

    def interrupt(self) -> None:
        """Does nothing, because nobody waits here."""


Thread = type[EngineThread] | type[PipelineThread]


def heard_by(kind: Thread, mirrored: bool) -> list[Any]:
    recorder, ended = Recorder(mirrored), queue.SimpleQueue[Any]()
    thread = kind(cast(Any, recorder), cast(Messenger, recorder), 1, ended.put)
    entry = StepEntry(AttemptId("w"), (5,), 0, (BlockId(3),), SamplingParams(), (), ())
    thread.start()
    thread.before_transfer(FetchBlocks("f", PEER, (), (BlockId(7), BlockId(8)), 1.0))
    thread.submit(RunStep((entry,)))
    thread.before_transfer(FinishStream("s"))
    thread.before_transfer(ExpectStream("s", (BlockId(2),), 0, 1.0))
    thread.submit(RunStep((entry,)))
    outcomes = [ended.get(timeout=60) for _ in range(2)]
    thread.stop(10.0)
    assert all(isinstance(outcome, StepEnded) for outcome in outcomes)
    return recorder.heard


@pytest.mark.parametrize("kind", [EngineThread, PipelineThread])
def test_arrivals_come_before_the_steps_submitted_after_them(kind: Thread) -> None:
    assert heard_by(kind, mirrored=True) == [[7, 8], *STEP, [2], *STEP]


@pytest.mark.parametrize("kind", [EngineThread, PipelineThread])
def test_an_engine_that_works_in_the_arena_hears_of_no_arrivals(kind: Thread) -> None:
    assert heard_by(kind, mirrored=False) == [*STEP, *STEP]


@pytest.mark.parametrize("grammar", ["", '%llguidance {}\nstart: "a"'])
def test_a_vocabulary_that_can_wait_is_read_in_a_pause_or_before_a_step_that_needs_it(
    grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "PAUSE_S", 0.5 if grammar else 0.01)
    recorder, ended = Recorder(False), queue.SimpleQueue[Any]()
    recorder.grammars.can_wait = True
    thread = EngineThread(cast(Any, recorder), cast(Messenger, recorder), 1, ended.put)
    params = SamplingParams(grammar=grammar)
    step = RunStep((StepEntry(AttemptId("w"), (5,), 0, (BlockId(3),), params),))
    thread.submit(step)
    thread.start()
    ended.get(timeout=60)
    assert recorder.has_read.wait(60)
    thread.submit(step)
    ended.get(timeout=60)
    thread.stop(10.0)
    assert (
        recorder.heard == ["vocabulary", *STEP, *STEP] if grammar else [*STEP, "vocabulary", *STEP]
    )
