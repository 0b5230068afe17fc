"""The threads that compute steps, and the watchdog that notices a step that hangs.

`EngineThread` computes one step at a time. `PipelineThread` drives an engine of several stages: it
begins the next step as soon as the first stage is free. The event loop submits steps to either and
receives their outcome. The thread of the event loop owns `LayerGates`, and the engine's thread the
`LayerWaits` of a step.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import torch

from moonpool.cores import pin_thread
from moonpool.cost.domain import CostDomain
from moonpool.cost.model import Chunk, CostModel
from moonpool.protocol.transfer_events import FetchEnded, LoadEnded
from moonpool.scheduler.actions import (
    Arriving,
    ExpectStream,
    FetchBlocks,
    LoadBlocks,
    RunStep,
    StepEnded,
    StepEntry,
    StepFailed,
    WorkerAction,
    WorkerEvent,
)
from moonpool.text.tokenizer import TokenizerError
from moonpool_engine.attention_offload.remote_ops import AttentionLostError
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.parallel.pipeline import Outcome, PipelineEngine
from moonpool_engine.engine.parallel.process_group import StageLostError
from moonpool_engine.engine.runner import Engine
from moonpool_engine.transfer.block_messenger import BlockMessenger
from moonpool_engine.transfer.gate import LayerGate

log = logging.getLogger("moonpool_engine.engine")

PATIENCE_S = 15.0
"""Least time limit that a step gets. A silent worker has the same limit, because both must outlast
a machine that is briefly starved."""
OFFLOADED_PATIENCE_S = 120.0
"""The least limit of a step with attention workers, which have deadlines of their own."""
SLOWER = 10.0
"""A step may take this many times its predicted time: other processes may occupy the cores."""

PAUSE_S = 3.0
"""A time without steps after which the engine does the preparations that could wait."""

Arrival = FetchBlocks | ExpectStream | LoadBlocks
"""Actions after which other threads write blocks of the arena."""
Drafted = Mapping[int, tuple[int, ...]]
"""Entry of a step -> the tokens that the draft model guessed for it."""
_Order = tuple[RunStep, Sequence[Sequence[LayerGate]]] | Arrival


class Drafting:
    """The draft model's part in each step. After an error of the draft model the instance continues
    without it."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter

    def run(self, step: RunStep) -> tuple[RunStep, Drafted, float]:
        """Returns the step with its drafts, what was guessed by entry, and the seconds."""
        if not any(entry.draft_task for entry in step.entries):
            return step, {}, 0.0
        if self._drafter is not None:
            try:
                entries, drafted, seconds = self._drafter.run(step.entries)
                return msgspec.structs.replace(step, entries=tuple(entries)), drafted, seconds
            except Exception as error:
                log.error("serving on without the draft model, which failed", exc_info=error)
                self._drafter = None
        undrafted = tuple([e.with_drafts(()) for e in step.entries])
        return msgspec.structs.replace(step, entries=undrafted), {}, 0.0


class LayerGates:
    """The gates of transfers under way that steps may wait for.

    A gate exists from the action that begins its transfer until the transfer's end is handled, so
    every transfer that a step waits for has one.
    """

    def __init__(self) -> None:
        self._fetches: dict[str, LayerGate] = {}
        self._loads: dict[str, LayerGate] = {}

    def begin(self, action: FetchBlocks | LoadBlocks) -> LayerGate:
        gate = LayerGate()
        if isinstance(action, FetchBlocks):
            self._fetches[action.fetch_id] = gate
        else:
            self._loads[action.load_id] = gate
        return gate

    def note(self, event: WorkerEvent) -> None:
        """Must be called with every event after it is handled."""
        if isinstance(event, FetchEnded):
            self._fetches.pop(event.fetch_id, None)
        elif isinstance(event, LoadEnded):
            self._loads.pop(event.load_id, None)

    def of_step(self, step: RunStep) -> list[Sequence[LayerGate]]:
        """Returns the gates of each entry, or an empty list if no entry waits."""
        arriving = [entry.arriving for entry in step.entries]
        if not any(arriving):
            return []
        return [() if one is None else self._of(one) for one in arriving]

    def _of(self, arriving: Arriving) -> Sequence[LayerGate]:
        gates = [self._loads[load_id] for load_id in arriving.load_ids]
        return [self._fetches[arriving.fetch_id], *gates] if arriving.fetch_id else gates


class LayerWaits:
    """Waits for the layers of one step. `gates[i]` are the gates of entry i.

    Used by the engine's thread before each layer's attention.
    """

    def __init__(self, step: RunStep, gates: Sequence[Sequence[LayerGate]]) -> None:
        self.waited_s = 0.0
        began_s = time.monotonic()
        self._entries = step.entries
        self._gates = gates
        self._missed: set[int] = set()
        self._deadlines_s = [
            began_s + (entry.arriving.timeout_s if entry.arriving is not None else 0.0)
            for entry in step.entries
        ]

    @property
    def missed(self) -> tuple[int, ...]:
        """Entries of which a layer did not arrive. Everything computed after a missed layer is
        void."""
        return tuple(sorted(self._missed))

    def before_attend(self, layer: int) -> Collection[int]:
        """Waits until `layer` of every entry has arrived, or will not arrive.

        Returns the entries that have missed a layer.
        """
        began_s = time.monotonic()
        for index, gates in enumerate(self._gates):
            if index in self._missed:
                continue
            if not all(gate.wait(layer, self._deadlines_s[index]) for gate in gates):
                self._missed.add(index)
        self.waited_s += time.monotonic() - began_s
        return self._missed

    def sound(self) -> list[StepEntry]:
        """Returns the entries whose computed layers may be sent."""
        return [entry for i, entry in enumerate(self._entries) if i not in self._missed]


class EngineThread:
    """Runs `RunStep` actions and posts their outcome.

    Each layer's finished blocks go to the messenger as soon as the layer is computed. If a part of
    a prefix is still arriving, each layer waits for its own slices (Mooncake 5.2).
    """

    def __init__(
        self,
        engine: Engine,
        messenger: BlockMessenger,
        num_threads: int,
        post: Callable[[StepEnded | StepFailed], None],
        cores: Sequence[int] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self._drafting = Drafting(drafter)
        self._engine = engine
        self._messenger = messenger
        self._num_threads = num_threads
        self._cores = cores
        self._post = post
        self._steps: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep, gates: Sequence[Sequence[LayerGate]] = ()) -> None:
        """Queues a step; the instance's state machine keeps at most one outstanding.

        `gates[i]` are the layer gates that entry i waits for. Without `gates` no entry has to wait.
        """
        self._steps.put((step, gates))

    def before_transfer(self, action: WorkerAction) -> None:
        """Must be called with every action before it is performed.

        If the action lets others write blocks of the arena, the engine is told before any later
        step is submitted.
        """
        if self._engine.host_sync is not None and isinstance(action, Arrival):
            self._steps.put(action)

    def stop(self, timeout_s: float) -> None:
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pin_thread(self._cores)
        torch.set_num_threads(self._num_threads)  # holds for the calling thread only
        while (order := self._next()) is not None:
            if not isinstance(order, tuple):
                assert self._engine.host_sync is not None
                self._engine.host_sync.arriving(order.block_ids)
                continue
            step, gates = order
            try:
                outcome: StepEnded | StepFailed = self._compute(step, gates)
            except StageLostError:
                return  # the engine has reported the lost rank, with which the instance ends
            except AttentionLostError as error:
                outcome = StepFailed(f"{error}", lost_arena=error.arena)
            except Exception as error:
                outcome = _step_failed(step, error)
            self._post(outcome)

    def _next(self) -> _Order | None:
        if self._engine.grammars.can_wait:
            with contextlib.suppress(queue.Empty):
                return self._steps.get(timeout=PAUSE_S)
            self._prepare_grammars()
        return self._steps.get()

    def _prepare_grammars(self) -> None:
        self._engine.grammars.can_wait = False
        try:
            self._engine.grammars.prepare()
        except TokenizerError as error:
            log.warning("structured output will fail: %s", error)

    def _compute(self, step: RunStep, gates: Sequence[Sequence[LayerGate]]) -> StepEnded:
        if self._engine.grammars.can_wait and any(
            entry.draw is not None and entry.draw.grammar for entry in step.entries
        ):
            self._prepare_grammars()  # before the step, whose time is measured
        step, drafted, drafting_s = self._drafting.run(step)
        begin_writing(self._messenger, step)
        waits = LayerWaits(step, gates)
        sends = any(entry.sends for entry in step.entries)
        result = self._engine.step(
            step.entries,
            (lambda layer: send_layer(self._messenger, waits.sound(), layer)) if sends else None,
            waits.before_attend if gates else None,
        )
        computed_s = drafting_s + result.seconds - waits.waited_s
        if gates:  # a step that draws no token does not read the last layer
            waits.before_attend(self._engine.layout.num_layers - 1)
        return StepEnded(
            result.tokens,
            computed_s,
            waits.missed,
            result.scored,
            result.pooled,
            result.further,
            drafted,
        )


class PipelineThread:
    """Drives an engine of several stages, with the methods of `EngineThread`.

    A layer's finished blocks go to the messenger as soon as its stage has computed it, from the
    memory that the stage wrote. If a stage is lost, its steps get no outcome, because the instance
    ends.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        messenger: BlockMessenger,
        num_threads: int,
        post: Callable[[StepEnded | StepFailed], None],
        drafter: Drafter | None = None,
    ) -> None:
        self._drafting = Drafting(drafter)
        self._engine = engine
        self._messenger = messenger
        self._num_threads = num_threads
        self._post = post
        self._steps: queue.SimpleQueue[RunStep | Arrival | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep, gates: Sequence[Sequence[LayerGate]] = ()) -> None:
        """At most `max_steps_in_flight` steps are outstanding. Stages do not wait for gates."""
        assert not gates, "an instance of stages computes only with blocks that have arrived"
        self._steps.put(step)

    def before_transfer(self, action: WorkerAction) -> None:
        if self._engine.host_sync is not None and isinstance(action, Arrival):
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
                return  # the engine has reported the lost stage already
            except Exception as error:
                assert isinstance(step, RunStep), "an arrival raises no other error"
                self._post(_step_failed(step, error))

    def _begin(self, step: RunStep) -> None:
        step, drafted, drafting_s = self._drafting.run(step)
        begin_writing(self._messenger, step)
        sends = [entry for entry in step.entries if entry.sends]
        self._engine.begin(
            step.entries,
            (lambda layer: send_layer(self._messenger, sends, layer)) if sends else None,
            lambda outcome: self._end(outcome, drafted, drafting_s),
        )

    def _end(self, outcome: Outcome, drafted: Drafted, drafting_s: float) -> None:
        if isinstance(outcome, StageLostError):
            return
        if isinstance(outcome, Exception):
            self._post(StepFailed(_reason(outcome)))
        else:
            seconds = drafting_s + outcome.seconds
            further = outcome.further
            self._post(StepEnded(outcome.tokens, seconds, further=further, drafted=drafted))


class StepWatchdog:
    """Notices an engine that hangs: a step whose time limit has passed.

    A process that dies is noticed at once, because its socket closes. A process that was stopped,
    or that is in a call that does not return, is not. The watchdog reads no clock: the caller says
    how much time has passed. Steps end in the order in which they begin, so it watches the oldest.
    """

    def __init__(self, cost: CostModel, num_stages: int, patience_s: float = PATIENCE_S) -> None:
        """`cost` predicts the time of a step in one of `num_stages` stages."""
        self._cost = cost
        self._num_stages = num_stages
        self._patience_s = patience_s
        self._limits_s: deque[float] = deque()
        self._waited_s = 0.0  # seconds waited for the oldest step

    @property
    def is_waiting(self) -> bool:
        """Whether a step is under way."""
        return bool(self._limits_s)

    def begin(self, step: RunStep) -> None:
        chunks = [_chunk(entry) for entry in step.entries if _is_chunk(entry)]
        contexts = [entry.start + 1 for entry in step.entries if not _is_chunk(entry)]
        stage_s = self._cost.step_s(chunks, len(contexts), sum(contexts))
        expected_s = self._num_stages * stage_s + step.drafting_s
        self._limits_s.append(max(self._patience_s, SLOWER * expected_s))

    def end(self) -> None:
        assert self._limits_s, "a step ended that had not begun"
        self._limits_s.popleft()
        self._waited_s = 0.0

    def wait(self, seconds: float) -> str | None:
        """Adds `seconds` to the wait. Returns what hangs, or None."""
        if not self._limits_s:
            return None
        self._waited_s += seconds
        if self._waited_s <= self._limits_s[0]:
            return None
        return f"a step has not ended in {self._waited_s:.0f} s: the engine hangs"


class DomainNotice:
    """Says once that a step is beyond what the instance's step times were measured for."""

    def __init__(self, domain: CostDomain | None) -> None:
        self._domain = domain

    def of(self, step: RunStep) -> str | None:
        """Returns a line for the log about the first such step, or None."""
        domain = self._domain
        if domain is None:
            return None
        longest = batch = context_tokens = 0
        for entry in step.entries:
            if _is_chunk(entry):
                longest = max(longest, entry.start + len(entry.new_token_ids))
            else:
                batch += 1
                context_tokens += entry.start + 1
        if longest > domain.prompt_tokens[1]:
            what = f"a prompt of {longest:,} tokens"
        elif batch > domain.decode_batch[1] or context_tokens > domain.context_tokens[1]:
            what = f"{batch:,} decodes with {context_tokens:,} tokens of context"
        else:
            return None
        self._domain = None
        return (
            f"step times were measured for {domain.describe()}; beyond them, as now for {what},"
            " the fitted formula itself goes on"
        )


def _step_failed(step: RunStep, error: Exception) -> StepFailed:
    log.error(
        "a step with %d sequences failed: %s",
        len(step.entries),
        ", ".join(entry.attempt_id for entry in step.entries),
        exc_info=error,
    )
    return StepFailed(_reason(error))


def _reason(error: Exception) -> str:
    return f"the engine failed: {type(error).__name__}: {error}"


def _is_chunk(entry: StepEntry) -> bool:
    return len(entry.new_token_ids) - entry.num_drafts > 1 or not entry.generated


def _chunk(entry: StepEntry) -> Chunk:
    return Chunk(len(entry.new_token_ids), entry.start, 0, entry.draw is not None)


def send_layer(messenger: BlockMessenger, entries: Iterable[StepEntry], layer: int) -> None:
    """Sends the blocks of one layer that a step has just completed (Mooncake 5.2)."""
    for entry in entries:
        if entry.sends:
            slices = [(index, block_id, layer) for index, block_id in entry.sends]
            messenger.send(entry.attempt_id, slices)


def begin_writing(messenger: BlockMessenger, step: RunStep) -> None:
    """Drops the checksums of the slots that a step writes. Call this before the step runs."""
    for entry in step.entries:
        end = entry.start + len(entry.new_token_ids) + step.max_repeats - 1
        messenger.forget_checksums(entry.block_ids, entry.start, end)
