"""A stage's own process: its layers, on the rows that the stage before it hands on.

It writes its layers' slices of the blocks into the one arena of the instance, which it has mapped;
on a GPU, by way of blocks of its own there. It decides nothing, and ends when the first stage does,
however that ends.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moonpool.engine.builtin import DTYPES, open_model
from moonpool.engine.cuda.mirror import Mirror, mirrored
from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, StepMeta
from moonpool.engine.runner import choose_ops, grammars_of, make_layout
from moonpool.engine.sampler import sample
from moonpool.engine.stages.ring import RingEnd, RingSize
from moonpool.engine.stages.wire import (
    LayerDone,
    StageArriving,
    StageFailed,
    StageReady,
    StageSetup,
    StageStep,
    StepDone,
    frame,
    receive_order,
    receive_setup,
    unpack_draws,
    unpack_meta,
    unpack_wanted,
)
from moonpool.kvcache.layout import BlockLayout
from moonpool.types import Token

MAX_FDS = 5  # the arena; memory and socket of the rings before and after it
log = logging.getLogger("moonpool.stage")


def run_stage(control: socket.socket) -> None:
    """Serves the first stage at the other end of `control` until it is gone."""
    threading.Thread(target=end_with, args=(control,), name="watch", daemon=True).start()
    try:
        setup, fds = receive_setup(control, MAX_FDS, StageSetup)
        try:
            stage = Stage(setup, fds, control)
        except (ValueError, OSError, MemoryError) as error:
            control.sendall(frame(StageFailed(message=str(error))))
            return
        control.sendall(frame(StageReady()))
        gc.collect()
        gc.freeze()
        while True:
            stage.obey(receive_order(control))
    except ConnectionError:  # a RingError, too
        return


def end_with(control: socket.socket) -> None:
    """Ends this process with the first stage, also in the middle of a step."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


class Stage:
    """Layers of the model over the instance's arena. Raises ValueError and OSError."""

    def __init__(self, setup: StageSetup, fds: list[int], control: socket.socket) -> None:
        pin(setup.cores)
        torch.set_num_threads(setup.threads)
        model = open_model(setup.model, setup.dtype)
        ops = choose_ops(model.dtype, setup.device, setup.quantization)
        layout = make_layout(model, setup.block_tokens, ops)
        if layout.fingerprint != setup.fingerprint:
            raise ValueError("the stages do not compute alike: are they one installation?")
        size = RingSize(setup.slot_bytes, setup.num_slots)
        arena_fd, *ring_fds = fds
        layers = range(setup.first_layer, setup.end_layer)
        self._cache = map_arena(arena_fd, layout, setup.num_blocks)
        self._mirror: Mirror | None = None
        if setup.device != "cpu":
            self._mirror = mirrored(self._cache, ops.device, layers)
            self._cache = self._mirror.cache
        self._device = ops.device
        self._before = RingEnd(ring_fds[0], socket.socket(fileno=ring_fds[1]), size, writes=False)
        self._after: RingEnd | None = None
        if len(ring_fds) > 2:
            after = socket.socket(fileno=ring_fds[3])
            self._after = RingEnd(ring_fds[2], after, size, writes=True)
        self._control = control
        self._dtype = DTYPES[model.dtype]
        self._grammars = grammars_of(model)
        if setup.end_layer == model.spec.num_layers:
            self._grammars.prepare()
        with torch.inference_mode():
            self._model = DecoderModel(model.spec, model.weights, ops, layers)

    def obey(self, order: StageStep | StageArriving) -> None:
        """Raises ConnectionError when another stage is gone."""
        if isinstance(order, StageStep):
            self._run(order)
        elif self._mirror is not None:
            self._mirror.arriving(order.block_ids)

    def _run(self, step: StageStep) -> None:
        """One step. Whatever becomes of it here, the next stage gets what it waits for. Raises
        ConnectionError when another stage is gone."""
        meta = unpack_meta(step)
        shape = (meta.num_rows, self._model.spec.hidden_size)
        residual = torch.empty(shape, dtype=self._dtype)
        normed = torch.empty(shape, dtype=self._dtype)
        self._before.read(residual)
        self._before.read(normed)
        began_s = time.perf_counter()
        done: tuple[Tensor, Tensor] | None = None
        tokens: tuple[Token, ...] = ()
        error = ""

        def on_layer(layer: int) -> None:
            self._control.sendall(frame(LayerDone(number=step.number, layer=layer)))

        try:
            with torch.inference_mode():
                done = self._advance(residual, normed, step, meta, on_layer)
                if step.draws and done is not None:
                    positions = [draw.position for draw in step.draws]
                    logits = self._model.logits(done[1])
                    tokens = tuple(sample(logits, unpack_draws(step), positions, self._grammars))
        except ConnectionError:
            raise
        except Exception as broken:
            log.exception("a step of %d rows failed", meta.num_rows)
            error = f"{type(broken).__name__}: {broken}"
        seconds = time.perf_counter() - began_s
        if self._after is not None:
            for tensor in done or (residual, normed):
                self._after.write(tensor)
        answer = StepDone(number=step.number, seconds=seconds, tokens=tokens, error=error)
        self._control.sendall(frame(answer))

    def _advance(
        self,
        residual: Tensor,
        normed: Tensor,
        step: StageStep,
        meta: StepMeta,
        on_layer: Callable[[int], None],
    ) -> tuple[Tensor, Tensor] | None:
        """As `DecoderModel.advance`; all it has written is in the arena when it returns."""
        wanted = unpack_wanted(step)
        if wanted is not None:
            wanted = wanted.to(self._device)
        announce = layer_done = on_layer if step.announced else None
        if self._mirror is not None:
            layer_done = self._mirror.begin(meta, step.announced)
        rows = residual.to(self._device), normed.to(self._device)
        done = self._model.advance(*rows, self._cache, meta, wanted, layer_done)
        if self._mirror is not None:
            self._mirror.end(announce)
        return done


def pin(cores: tuple[int, ...]) -> None:
    """This thread, which computes, and those it starts. Where that is refused, nothing is."""
    try:
        if cores:
            os.sched_setaffinity(0, cores)
    except OSError as error:
        log.info("not pinned to cores %s: %s", cores, error.strerror)


def map_arena(fd: int, layout: BlockLayout, num_blocks: int) -> KvCache:
    """The same memory as the first stage's; `fd` is closed."""
    try:
        mapping = mmap.mmap(fd, num_blocks * layout.block_bytes)
    finally:
        os.close(fd)
    shape = (num_blocks, layout.num_layers, layout.slice_elements)
    flat = torch.frombuffer(mapping, dtype=DTYPES[layout.dtype])
    return KvCache(flat.view(shape), layout)
