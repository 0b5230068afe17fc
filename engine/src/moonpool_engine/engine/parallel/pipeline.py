"""The first stage's part of the pipeline-parallel engine; it starts the other stages.

Chunks of one prompt, or micro-batches of decodes, are in different stages at the same time: `begin`
returns as soon as the first stage has computed a step, and steps end in the order they began.

All stages write their layers' slices into one arena, so other parts see complete blocks. On GPUs
each stage computes in GPU blocks and copies its slices to the arena. The engine does not decide
what runs, and between steps it keeps only the weights. Figures: docs/decisions/parallelism.md.
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

from moonpool.config.tables import Quantization
from moonpool.scheduler.actions import StepEntry
from moonpool.types import Token
from moonpool_engine.engine.builtin import DTYPES, LoadedModel
from moonpool_engine.engine.cuda.host_sync import HostGpuSync, make_host_sync
from moonpool_engine.engine.device import stage_device
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, Ops
from moonpool_engine.engine.parallel.process_group import (
    END_S,
    PeerProcess,
    StageLostError,
    StagePlace,
    start_stages,
)
from moonpool_engine.engine.parallel.stage_ring import RingEnd, RingError, RingSize
from moonpool_engine.engine.parallel.stage_wire import (
    FromOther,
    Inbox,
    LayerDone,
    StageArriving,
    StageSetup,
    StepDone,
    pack_step,
    with_draws,
)
from moonpool_engine.engine.sampler import draw_of
from moonpool_engine.engine.step import LayerDone as OnLayer
from moonpool_engine.engine.step import (
    Rows,
    StepError,
    StepResult,
    drawing_rows,
    first_positions,
    plan_rows,
)

SLOT_BYTES = 256 << 10
# number of full chunks that a ring holds, so that a stage does not wait for the next one to read
STEPS_AHEAD = 2
_READ_BYTES = 1 << 16
log = logging.getLogger("moonpool_engine.engine")


class StageStepError(RuntimeError):
    """A stage could not compute a step. Other steps of the pipeline are not affected."""


Outcome = StepResult | Exception
OnEnd = Callable[[Outcome], None]


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage. If layers do not divide evenly, the first stages have one more,
    because the last stage has the LM head. Raises ValueError."""
    if num_stages > num_layers:
        raise ValueError(
            f"the model has {num_layers} layers: it cannot have {num_stages} stages; "
            f"use --pipeline-parallel-size {num_layers} or less"
        )
    share, more = divmod(num_layers, num_stages)
    bounds = [share * k + min(k, more) for k in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


@dataclass(slots=True)
class _StepInFlight:
    """A step that has not ended. `missing` is the number of stages that have not finished the
    step."""

    began_s: float
    entries: Sequence[StepEntry]
    on_layer: OnLayer | None
    on_end: OnEnd
    missing: int
    tokens: Sequence[tuple[Token, ...]] = ()  # by draw
    error: str = ""


@dataclass(slots=True)
class StageTimes:
    """Seconds of computation, per stage."""

    busy_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """`threads` is the number of threads per stage. `chunk_tokens` is a size that few steps exceed;
    it determines the size of the rings. `cores` are the cores of the engine, to be divided between
    the stages; () means any."""

    num_stages: int
    threads: int
    chunk_tokens: int
    quantization: Quantization = "none"
    cores: tuple[int, ...] = ()
    device: str = "cpu"

    def cores_of(self, stage: int) -> tuple[int, ...]:
        """Returns disjoint cores per stage if there are enough, or else all cores."""
        share = len(self.cores) // self.num_stages
        return self.cores[stage * share : (stage + 1) * share] if share else self.cores


class PipelineEngine:
    """The engine of an instance with several stages.

    Create it before the arena behind `cache` and `arena_fd` is sealed. `on_lost` is called once,
    from another thread, if a stage ends unexpectedly. Raises ValueError, StageLostError.
    """

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
        self.cores = options.cores_of(0)  # the cores of the thread that calls `begin`
        self.ops_name = f"{ops.name}, {num_stages} stages"
        self.host_sync: HostGpuSync | None = None
        self.times = StageTimes([0.0] * num_stages)
        self._cache = cache
        self._dtype = DTYPES[model.dtype]
        self._adapters = model.adapter_numbers
        self._device = ops.device
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards the next four fields
        self._in_flight: dict[int, _StepInFlight] = {}
        self._number = 0
        self._lost = ""
        self._closing = False
        setup = StageSetup(
            model=model.name,
            dtype=model.dtype,
            quantization=options.quantization,
            kv_dtype=model.kv_dtype,
            block_tokens=cache.layout.block_tokens,
            num_blocks=self.num_blocks,
            fingerprint=cache.layout.fingerprint,
            first_layer=0,
            end_layer=0,
            threads=options.threads,
            cores=(),
            slot_bytes=SLOT_BYTES,
            num_slots=_num_slots(options.chunk_tokens, model),
            lora_modules=model.lora_modules,
        )
        own = [
            StagePlace(layers[k], options.cores_of(k), stage_device(options.device, k))
            for k in range(1, num_stages)
        ]
        peers, fd, sock = start_stages(setup, own, arena_fd, owner)
        self._peers: list[PeerProcess] = peers
        size = RingSize(setup.slot_bytes, setup.num_slots)
        self._after = RingEnd(fd, sock, size, writes=True)
        try:
            if options.device != "cpu":
                self.host_sync = make_host_sync(cache, ops.device, layers[0])
                self._cache = self.host_sync.cache
            with torch.inference_mode():
                self._model = DecoderModel(
                    model.spec, model.weights, ops, layers[0], adapters=model.adapters
                )
            for peer in self._peers:
                peer.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._read, name="stages", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the stages after the first."""
        return [peer.process.pid for peer in self._peers]

    def begin(self, entries: Sequence[StepEntry], on_layer: OnLayer | None, on_end: OnEnd) -> None:
        """Runs the first stage; the other stages follow. Only one thread may call `begin` at a
        time.

        `on_layer(i)` is called, from this thread or another, once layer i of the whole step is in
        the arena; `on_end` is called after all layers. Raises StepError, StageLostError.
        """
        if any(entry.pooling == "mean" for entry in entries):
            raise StepError("stages compute embeddings by the last token only")
        rows = plan_rows(entries, self.spec, self.layout, self.num_blocks, self._adapters)
        began_s = time.perf_counter()
        with self._lock:
            if self._lost:
                raise StageLostError(self._lost)
            number = self._number
            self._number += 1
            self._in_flight[number] = _StepInFlight(
                began_s, entries, on_layer, on_end, self.num_stages
            )
        try:
            self._send_step(number, rows, entries, on_layer is not None)
            self._run_first(number, rows, on_layer, began_s)
        except (RingError, OSError) as error:
            raise StageLostError(self._lost or f"a stage has ended: {error}") from None

    def arriving(self, block_ids: Sequence[int]) -> None:
        """Announces that the messenger is about to write these blocks of the arena.

        Needed only with `host_sync`; call it between two calls of `begin`. Raises StageLostError.
        """
        assert self.host_sync is not None
        self.host_sync.arriving(block_ids)
        try:
            for peer in self._peers:
                peer.send(StageArriving(block_ids=tuple(block_ids)))
        except OSError as error:
            raise StageLostError(self._lost or f"a stage has ended: {error}") from None

    def step(self, entries: Sequence[StepEntry], on_layer: OnLayer | None = None) -> StepResult:
        """Runs one step to its end, as `Engine.step` does. Raises StepError, StageStepError,
        StageLostError."""
        ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.begin(entries, on_layer, ended.put)
        outcome = ended.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def interrupt(self) -> None:
        """Ends every wait for another stage. Any thread may call it."""
        with self._lock:
            self._closing = True
        self._after.interrupt()

    def close(self) -> None:
        """Ends all other stages."""
        self.interrupt()
        for peer in self._peers:
            peer.ask_to_end()
        by_s = time.monotonic() + END_S
        for peer in self._peers:
            peer.end(by_s)
        self._after.close()

    def _send_step(
        self, number: int, rows: Rows, entries: Sequence[StepEntry], announced: bool
    ) -> None:
        step = pack_step(number, rows.meta, announced)
        for peer in self._peers[:-1]:
            peer.send(step)
        drawing = [i for i, entry in enumerate(entries) if entry.draw is not None]
        draws = [draw_of(entries[i], self.spec.eos_token_ids) for i in drawing]
        wanted = drawing_rows(entries, drawing, rows.last)
        positions = first_positions(entries, drawing)
        self._peers[-1].send(with_draws(step, wanted, draws, positions))

    def _run_first(self, number: int, rows: Rows, on_layer: OnLayer | None, began_s: float) -> None:
        sync, layer_done = self.host_sync, on_layer
        shape = (rows.meta.num_rows, self.spec.hidden_size)
        done = (torch.zeros(shape, dtype=self._dtype), torch.zeros(shape, dtype=self._dtype))
        error = ""
        try:
            with torch.inference_mode():
                if sync is not None:
                    layer_done = sync.begin(rows.meta, announced=on_layer is not None)
                embedded = self._model.embed(rows.token_ids.to(self._device))
                through = self._model.advance(*embedded, self._cache, rows.meta, None, layer_done)
                assert through is not None
                done = through
                if sync is not None:
                    sync.end(on_layer)
        except Exception as broken:
            log.exception("a step of %d rows failed", rows.meta.num_rows)
            error = f"{type(broken).__name__}: {broken}"
        seconds = time.perf_counter() - began_s
        # Counted before the last stage can finish the step, so that always the same thread ends
        # steps, in their order.
        self._on_step_done(0, StepDone(number=number, seconds=seconds, error=error))
        for tensor in done:
            self._after.write(tensor)

    # Handles messages of the other stages

    def _read(self) -> None:
        selector = selectors.DefaultSelector()
        for stage, peer in enumerate(self._peers, 1):
            selector.register(peer.control, selectors.EVENT_READ, (stage, Inbox()))
        while True:
            for key, _ in selector.select():
                stage, inbox = key.data
                peer = self._peers[stage - 1]
                try:
                    data = peer.control.recv(_READ_BYTES)
                except OSError:
                    data = b""
                if not data:
                    selector.close()
                    self._on_peer_lost(f"{peer.name} (process {peer.process.pid}) has ended")
                    return
                for message in inbox.feed(data):
                    self._on_message(stage, message)

    def _on_message(self, stage: int, message: FromOther) -> None:
        match message:
            case LayerDone():
                on_layer = self._in_flight[message.number].on_layer
                assert on_layer is not None
                on_layer(message.layer)
            case StepDone():
                self._on_step_done(stage, message)

    def _on_step_done(self, stage: int, done: StepDone) -> None:
        """Counts a stage that has finished a step; the last one ends the step."""
        with self._lock:
            self.times.busy_s[stage] += done.seconds
            step = self._in_flight.get(done.number)
            if step is None:
                return  # the step was abandoned because a stage is lost
            step.missing -= 1
            step.tokens = step.tokens or done.tokens
            step.error = step.error or done.error
            if step.missing:
                return
            del self._in_flight[done.number]
        if step.error:
            step.on_end(StageStepError(step.error))
            return
        drawing = [i for i, entry in enumerate(step.entries) if entry.draw is not None]
        drawn = dict(zip(drawing, step.tokens, strict=True))
        tokens = [drawn[i][0] if i in drawn else None for i in range(len(step.entries))]
        further = {i: found[1:] for i, found in drawn.items() if len(found) > 1}
        seconds = time.perf_counter() - step.began_s
        step.on_end(StepResult(tokens, seconds, further=further))

    def _on_peer_lost(self, message: str) -> None:
        with self._lock:
            self._lost = message
            given_up = list(self._in_flight.values())
            self._in_flight.clear()
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
