"""The thread of the first of several stages: takes steps in as fast as it is through with them,
while the other stages have earlier ones."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from moonpool.engine.stages.fellows import StageLostError
from moonpool.engine.stages.pipeline import Outcome, PipelineEngine
from moonpool.messenger.gate import LayerGate
from moonpool.messenger.messenger import Messenger
from moonpool.runtime.cores import pin_thread
from moonpool.runtime.engine_thread import Arrival, sequence_step
from moonpool.runtime.transfers import begin_writing, send_layer
from moonpool.workers.actions import RunStep, StepEnded, StepFailed, WorkerAction

log = logging.getLogger("moonpool.engine")


class PipelineThread:
    """As `EngineThread`, for an engine of stages. Each layer's finished blocks are handed to the
    messenger as soon as its stage has done it: they leave from the memory that stage wrote. A step
    that a lost stage took along is not answered: the instance ends with it."""

    def __init__(
        self,
        engine: PipelineEngine,
        messenger: Messenger,
        eos_token_ids: tuple[int, ...],
        num_threads: int,
        post: Callable[[StepEnded | StepFailed], None],
    ) -> None:
        self._engine = engine
        self._messenger = messenger
        self._eos = eos_token_ids
        self._num_threads = num_threads
        self._post = post
        self._steps: queue.SimpleQueue[RunStep | Arrival | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep, gates: Sequence[Sequence[LayerGate]] = ()) -> None:
        """No more are outstanding than the state machine's `max_steps_in_flight`; stages wait at no
        gates."""
        assert not gates, "an instance of stages computes with nothing that still arrives"
        self._steps.put(step)

    def before_transfer(self, action: WorkerAction) -> None:
        """As `EngineThread.before_transfer`."""
        if self._engine.mirror is not None and isinstance(action, Arrival):
            self._steps.put(action)

    def stop(self, timeout_s: float) -> None:
        self._steps.put(None)
        self._engine.interrupt()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pin_thread(self._engine.cores)
        torch.set_num_threads(self._num_threads)  # holds for the calling thread only
        while (step := self._steps.get()) is not None:
            try:
                if isinstance(step, RunStep):
                    self._begin(step)
                else:
                    self._engine.arriving(step.block_ids)
            except StageLostError:
                return  # the engine has told its owner
            except Exception as error:
                assert isinstance(step, RunStep), "the rest raises nothing else"
                log.exception("a step of %d works failed", len(step.entries))
                self._post(StepFailed(_reason(error)))

    def _begin(self, step: RunStep) -> None:
        begin_writing(self._messenger, step)
        sends = [entry for entry in step.entries if entry.sends]
        self._engine.begin(
            [sequence_step(entry, self._eos) for entry in step.entries],
            (lambda layer: send_layer(self._messenger, sends, layer)) if sends else None,
            self._end,
        )

    def _end(self, outcome: Outcome) -> None:
        if isinstance(outcome, StageLostError):
            return
        if isinstance(outcome, Exception):
            self._post(StepFailed(_reason(outcome)))
        else:
            self._post(StepEnded(outcome.tokens, outcome.seconds))


def _reason(error: Exception) -> str:
    return f"the engine failed: {type(error).__name__}: {error}"
