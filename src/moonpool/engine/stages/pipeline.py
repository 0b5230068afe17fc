"""The engine of several stages, as the first of them: it starts the others, and has them run steps.

Chunks of a prompt, and micro-batches, are in different stages at the same time: `begin` returns as
soon as the first stage is done with a step, and steps end in the order in which they began. All
stages write their layers' slices into the one arena, so that blocks are whole blocks to everyone
else; on GPUs, each by way of its layers' blocks there. Never decides what runs; holds nothing
between steps but the weights of its layers.
"""

from __future__ import annotations

import logging
import queue
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from moonpool.config import Quantization
from moonpool.engine.builtin import DTYPES, LoadedModel
from moonpool.engine.cuda.choice import stage_device
from moonpool.engine.cuda.mirror import Mirror, mirrored
from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, Ops
from moonpool.engine.rows import Rows, plan_rows
from moonpool.engine.stages.fellows import (
    END_S,
    Fellow,
    StageLostError,
    StagePlace,
    start_fellows,
)
from moonpool.engine.stages.ring import RingEnd, RingError, RingSize
from moonpool.engine.stages.wire import (
    FromOther,
    Inbox,
    LayerDone,
    StageArriving,
    StageSetup,
    StepDone,
    pack_step,
    with_draws,
)
from moonpool.engine.step import LayerDone as OnLayer
from moonpool.engine.step import SequenceStep, StepResult
from moonpool.types import Token

SLOT_BYTES = 256 << 10
STEPS_AHEAD = 2  # full chunks that a ring holds, so that no stage waits for the next to read
_READ_BYTES = 1 << 16
log = logging.getLogger("moonpool.engine")


class StageStepError(RuntimeError):
    """A stage could not compute a step; the others go on."""


Outcome = StepResult | Exception
OnEnd = Callable[[Outcome], None]


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage; the first ones have one more where they do not divide evenly, since the
    last one has the LM head. Raises ValueError."""
    if num_stages > num_layers:
        raise ValueError(
            f"the model has {num_layers} layers: it cannot have {num_stages} stages; "
            f"use --pipeline-parallel-size {num_layers} or less"
        )
    share, more = divmod(num_layers, num_stages)
    bounds = [share * k + min(k, more) for k in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


@dataclass(slots=True)
class _UnderWay:
    """A step that has not ended. `missing`: how many stages have not done it."""

    began_s: float
    sequences: Sequence[SequenceStep]
    on_layer: OnLayer | None
    on_end: OnEnd
    missing: int
    tokens: Sequence[Token] = ()
    error: str = ""


@dataclass(slots=True)
class StageTimes:
    """Seconds that each stage has computed."""

    busy_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """`threads`: of each stage. `chunk_tokens`: what most steps have at most. `cores`: which the
    engine has, for the stages to share out; (): any."""

    num_stages: int
    threads: int
    chunk_tokens: int
    quantization: Quantization = "none"
    cores: tuple[int, ...] = ()
    device: str = "cpu"

    def cores_of(self, stage: int) -> tuple[int, ...]:
        """None of another stage's, if there are enough."""
        share = len(self.cores) // self.num_stages
        return self.cores[stage * share : (stage + 1) * share] if share else self.cores


class PipelineEngine:
    """To be made before anybody seals the arena behind `cache` and `arena_fd`. `on_lost` is called
    once, from a thread, if a stage ends that should not. Raises ValueError, StageLostError."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        cache: KvCache,
        arena_fd: int,
        options: StageOptions,
        owner: str,
        on_lost: Callable[[str], None],
    ) -> None:
        num_stages = options.num_stages
        layers = split_layers(model.spec.num_layers, num_stages)
        self.spec = model.spec
        self.layout = cache.layout
        self.num_blocks = cache.blocks.shape[0]
        self.num_stages = num_stages
        self.cores = options.cores_of(0)  # for the thread that calls `begin`
        self.ops_name = f"{ops.name}, {num_stages} stages"
        self.mirror: Mirror | None = None
        self.times = StageTimes([0.0] * num_stages)
        self._cache = cache
        self._dtype = DTYPES[model.dtype]
        self._device = ops.device
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards what follows
        self._under_way: dict[int, _UnderWay] = {}
        self._number = 0
        self._lost = ""
        self._closing = False
        setup = StageSetup(
            model=model.name,
            dtype=model.dtype,
            quantization=options.quantization,
            block_tokens=cache.layout.block_tokens,
            num_blocks=self.num_blocks,
            fingerprint=cache.layout.fingerprint,
            first_layer=0,
            end_layer=0,
            threads=options.threads,
            cores=(),
            slot_bytes=SLOT_BYTES,
            num_slots=_num_slots(options.chunk_tokens, model),
        )
        own = [
            StagePlace(layers[k], options.cores_of(k), stage_device(options.device, k))
            for k in range(1, num_stages)
        ]
        fellows, fd, sock = start_fellows(setup, own, arena_fd, owner)
        self._fellows: list[Fellow] = fellows
        size = RingSize(setup.slot_bytes, setup.num_slots)
        self._after = RingEnd(fd, sock, size, writes=True)
        try:
            if options.device != "cpu":
                self.mirror = mirrored(cache, ops.device, layers[0])
                self._cache = self.mirror.cache
            with torch.inference_mode():
                self._model = DecoderModel(model.spec, model.weights, ops, layers[0])
            for fellow in self._fellows:
                fellow.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._read, name="stages", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        """Of the stages that are processes of their own."""
        return [fellow.process.pid for fellow in self._fellows]

    def begin(
        self, sequences: Sequence[SequenceStep], on_layer: OnLayer | None, on_end: OnEnd
    ) -> None:
        """Runs the first stage; the others follow. One thread at a time. `on_layer` is called, from
        this thread or another, for each layer whose slices of the whole step are in their blocks,
        and, after all of them, `on_end`. Raises StepError, and StageLostError."""
        rows = plan_rows(sequences, self.spec, self.layout, self.num_blocks)
        began_s = time.perf_counter()
        with self._lock:
            if self._lost:
                raise StageLostError(self._lost)
            number = self._number
            self._number += 1
            self._under_way[number] = _UnderWay(
                began_s, sequences, on_layer, on_end, self.num_stages
            )
        try:
            self._send_step(number, rows, sequences, on_layer is not None)
            self._run_first(number, rows, on_layer, began_s)
        except (RingError, OSError) as error:
            raise StageLostError(self._lost or f"a stage is gone: {error}") from None

    def arriving(self, block_ids: Sequence[int]) -> None:
        """The messenger is about to write these blocks of the arena; to be told, between two
        `begin`, where there is a `mirror`. Raises StageLostError."""
        assert self.mirror is not None
        self.mirror.arriving(block_ids)
        try:
            for fellow in self._fellows:
                fellow.send(StageArriving(block_ids=tuple(block_ids)))
        except OSError as error:
            raise StageLostError(self._lost or f"a stage is gone: {error}") from None

    def step(
        self, sequences: Sequence[SequenceStep], on_layer: OnLayer | None = None
    ) -> StepResult:
        """One step from begin to end, as `Engine.step`."""
        ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.begin(sequences, on_layer, ended.put)
        outcome = ended.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def interrupt(self) -> None:
        """From any thread: whoever waits for a stage stops waiting."""
        with self._lock:
            self._closing = True
        self._after.interrupt()

    def close(self) -> None:
        """Ends the other stages."""
        self.interrupt()
        for fellow in self._fellows:
            fellow.hang_up()
        by_s = time.monotonic() + END_S
        for fellow in self._fellows:
            fellow.end(by_s)
        self._after.close()

    def _send_step(
        self, number: int, rows: Rows, sequences: Sequence[SequenceStep], announced: bool
    ) -> None:
        step = pack_step(number, rows.meta, announced)
        for fellow in self._fellows[:-1]:
            fellow.send(step)
        drawing = [i for i, sequence in enumerate(sequences) if sequence.draw is not None]
        draws = [draw for s in sequences if (draw := s.draw) is not None]
        ends = [sequences[i].start + len(sequences[i].new_token_ids) for i in drawing]
        self._fellows[-1].send(with_draws(step, rows.last[drawing], draws, ends))

    def _run_first(self, number: int, rows: Rows, on_layer: OnLayer | None, began_s: float) -> None:
        mirror, layer_done = self.mirror, on_layer
        shape = (rows.meta.num_rows, self.spec.hidden_size)
        done = (torch.zeros(shape, dtype=self._dtype), torch.zeros(shape, dtype=self._dtype))
        error = ""
        try:
            with torch.inference_mode():
                if mirror is not None:
                    layer_done = mirror.begin(rows.meta, announced=on_layer is not None)
                embedded = self._model.embed(rows.token_ids.to(self._device))
                through = self._model.advance(*embedded, self._cache, rows.meta, None, layer_done)
                assert through is not None
                done = through
                if mirror is not None:
                    mirror.end(on_layer)
        except Exception as broken:
            log.exception("a step of %d rows failed", rows.meta.num_rows)
            error = f"{type(broken).__name__}: {broken}"
        seconds = time.perf_counter() - began_s
        # Before the last stage can end the step, so that ends come from one thread, in order.
        self._note(0, StepDone(number=number, seconds=seconds, error=error))
        for tensor in done:
            self._after.write(tensor)

    # The word of the other stages

    def _read(self) -> None:
        selector = selectors.DefaultSelector()
        for stage, fellow in enumerate(self._fellows, 1):
            selector.register(fellow.control, selectors.EVENT_READ, (stage, Inbox()))
        while True:
            for key, _ in selector.select():
                stage, inbox = key.data
                fellow = self._fellows[stage - 1]
                try:
                    data = fellow.control.recv(_READ_BYTES)
                except OSError:
                    data = b""
                if not data:
                    selector.close()
                    self._lose(f"{fellow.name} (process {fellow.process.pid}) has ended")
                    return
                for message in inbox.feed(data):
                    self._hear(stage, message)

    def _hear(self, stage: int, message: FromOther) -> None:
        match message:
            case LayerDone():
                on_layer = self._under_way[message.number].on_layer
                assert on_layer is not None
                on_layer(message.layer)
            case StepDone():
                self._note(stage, message)

    def _note(self, stage: int, done: StepDone) -> None:
        """A stage is through with a step."""
        with self._lock:
            self.times.busy_s[stage] += done.seconds
            step = self._under_way.get(done.number)
            if step is None:
                return  # it was given up, as a stage is lost
            step.missing -= 1
            step.tokens = step.tokens or done.tokens
            step.error = step.error or done.error
            if step.missing:
                return
            del self._under_way[done.number]
        if step.error:
            step.on_end(StageStepError(step.error))
            return
        drawn = iter(step.tokens)
        tokens = [None if s.draw is None else next(drawn) for s in step.sequences]
        step.on_end(StepResult(tokens, time.perf_counter() - step.began_s))

    def _lose(self, message: str) -> None:
        with self._lock:
            self._lost = message
            given_up = list(self._under_way.values())
            self._under_way.clear()
            closing = self._closing
        self._after.interrupt()
        for step in given_up:
            step.on_end(StageLostError(message))
        if not closing:
            self._on_lost(message)


def _num_slots(chunk_tokens: int, model: LoadedModel) -> int:
    element_bytes = DTYPES[model.dtype].itemsize
    tensor_bytes = chunk_tokens * model.spec.hidden_size * element_bytes
    return 2 * STEPS_AHEAD * -(-tensor_bytes // SLOT_BYTES)
