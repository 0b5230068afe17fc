"""The thread that computes: one step at a time, handed over and answered through the event loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from moonpool.attention.remote_ops import AttentionLostError
from moonpool.engine.runner import Engine
from moonpool.engine.stages.fellows import StageLostError
from moonpool.engine.step import Draw, SequenceStep
from moonpool.messenger.gate import LayerGate
from moonpool.messenger.messenger import Messenger
from moonpool.runtime.cores import pin_thread
from moonpool.runtime.layer_waits import LayerWaits
from moonpool.runtime.offload import Offload
from moonpool.runtime.transfers import begin_writing, send_layer
from moonpool.types import RequestId
from moonpool.workers.actions import (
    ExpectStream,
    FetchBlocks,
    LoadBlocks,
    RunStep,
    StepEnded,
    StepEntry,
    StepFailed,
    WorkerAction,
)

log = logging.getLogger("moonpool.engine")

Arrival = FetchBlocks | ExpectStream | LoadBlocks
"""What lets others write blocks of the arena."""
_Order = tuple[RunStep, Sequence[Sequence[LayerGate]]] | Arrival


class EngineThread:
    """Runs `RunStep` actions and posts their outcome. While a step runs, each layer's finished
    blocks are handed to the messenger as soon as the layer is done, and where some of a prefix is
    still arriving, each layer waits for its own of it (Mooncake 5.2)."""

    def __init__(
        self,
        engine: Engine,
        messenger: Messenger | Offload,
        eos_token_ids: tuple[int, ...],
        num_threads: int,
        post: Callable[[StepEnded | StepFailed], None],
        cores: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._messenger = messenger
        self._eos = eos_token_ids
        self._num_threads = num_threads
        self._cores = cores
        self._post = post
        self._steps: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep, gates: Sequence[Sequence[LayerGate]] = ()) -> None:
        """At most one step is outstanding: the instance's state machine sees to it. `gates[i]` are
        what the i-th entry waits at; none at all: nobody waits."""
        self._steps.put((step, gates))

    def before_transfer(self, action: WorkerAction) -> None:
        """To be called with every action before it is performed: if it lets others write blocks of
        the arena, the engine learns of it before any step that is submitted later."""
        if self._engine.mirror is None:
            return
        if isinstance(action, Arrival):
            self._steps.put(action)

    def stop(self, timeout_s: float) -> None:
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pin_thread(self._cores)
        torch.set_num_threads(self._num_threads)  # holds for the calling thread only
        while (order := self._steps.get()) is not None:
            if not isinstance(order, tuple):
                assert self._engine.mirror is not None
                self._engine.mirror.arriving(order.block_ids)
                continue
            step, gates = order
            try:
                outcome: StepEnded | StepFailed = self._compute(step, gates)
            except StageLostError:
                return  # the instance ends with its rank; the engine has told its owner
            except AttentionLostError as error:
                assert isinstance(self._messenger, Offload), "only its steps need such workers"
                arena = self._messenger.arena_of(error.worker)
                outcome = StepFailed(f"{error}", lost_arena=arena)
            except Exception as error:
                log.exception("a step of %d works failed", len(step.entries))
                outcome = StepFailed(f"the engine failed: {type(error).__name__}: {error}")
            self._post(outcome)

    def _compute(self, step: RunStep, gates: Sequence[Sequence[LayerGate]]) -> StepEnded:
        begin_writing(self._messenger, step)
        waits = LayerWaits(step, gates)
        sends = any(entry.sends for entry in step.entries)
        result = self._engine.step(
            [sequence_step(entry, self._eos) for entry in step.entries],
            (lambda layer: send_layer(self._messenger, waits.sound(), layer)) if sends else None,
            waits.before_attend if gates else None,
        )
        computed_s = result.seconds - waits.waited_s
        if gates:  # a step that draws nothing does not read the last layer
            waits.before_attend(self._engine.layout.num_layers - 1)
        return StepEnded(result.tokens, computed_s, waits.missed)


def sequence_step(entry: StepEntry, eos_token_ids: Sequence[int]) -> SequenceStep:
    """What the state machine plans, in the engine's words."""
    draw = None
    if entry.draw is not None:
        draw = Draw(entry.draw, entry.generated, eos_token_ids, entry.prompt_ids)
    return SequenceStep(
        RequestId(entry.work_id), entry.new_token_ids, entry.start, entry.block_ids, draw
    )
