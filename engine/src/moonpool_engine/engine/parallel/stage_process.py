"""The process of a pipeline stage: its layers, over the rows that the previous stage sends.

The stage writes its layers' slices of the blocks into the instance's one arena, which it maps. On a
GPU it computes in GPU blocks and copies their contents to the arena. A stage makes no decisions,
and ends when the first stage ends.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moonpool.types import Token
from moonpool_engine.engine.builtin import DTYPES, open_model
from moonpool_engine.engine.cuda.host_sync import HostGpuSync, make_host_sync
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import StepMeta
from moonpool_engine.engine.parallel.process_group import map_arena, pin, run_peer
from moonpool_engine.engine.parallel.stage_ring import RingEnd, RingSize
from moonpool_engine.engine.parallel.stage_wire import (
    LayerDone,
    StageArriving,
    StageSetup,
    StageStep,
    StepDone,
    frame,
    unpack_draws,
    unpack_meta,
    unpack_wanted,
)
from moonpool_engine.engine.runner import choose_ops, grammars_of, make_layout
from moonpool_engine.engine.sampler import sample
from moonpool_engine.engine.step import pool_last

# descriptors of the arena, and of memory and socket of the rings before and after the stage
MAX_FDS = 5
log = logging.getLogger("moonpool.stage")


def run_stage(control: socket.socket) -> None:
    """Serves the first stage, at the other end of `control`, until that stage ends."""
    run_peer(control, MAX_FDS, StageSetup, lambda setup, fds: Stage(setup, fds, control))


class Stage:
    """Some layers of the model, over the instance's arena. Raises ValueError and OSError."""

    def __init__(self, setup: StageSetup, fds: list[int], control: socket.socket) -> None:
        pin(setup.cores)
        torch.set_num_threads(setup.threads)
        model = open_model(setup.model, setup.dtype, setup.lora_modules, setup.kv_dtype)
        ops = choose_ops(model.dtype, setup.device, setup.quantization)
        layout = make_layout(model, setup.block_tokens, ops)
        if layout.fingerprint != setup.fingerprint:
            raise ValueError("the stages compute with different kernels: use one installation")
        size = RingSize(setup.slot_bytes, setup.num_slots)
        arena_fd, *ring_fds = fds
        layers = range(setup.first_layer, setup.end_layer)
        self._cache = map_arena(arena_fd, layout, setup.num_blocks)
        self._host_sync: HostGpuSync | None = None
        if setup.device != "cpu":
            self._host_sync = make_host_sync(self._cache, ops.device, layers)
            self._cache = self._host_sync.cache
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
            self._model = DecoderModel(
                model.spec, model.weights, ops, layers, adapters=model.adapters
            )

    def join(self) -> None:
        """A stage needs nothing from the stages after it."""

    def handle(self, order: StageStep | StageArriving) -> None:
        """Raises ConnectionError if another stage has ended."""
        if isinstance(order, StageStep):
            self._run(order)
        elif self._host_sync is not None:
            self._host_sync.arriving(order.block_ids)

    def _run(self, step: StageStep) -> None:
        """Computes one step. If this stage fails, the next stage still receives its input, so that
        the rings stay in step. Raises ConnectionError if another stage has ended."""
        meta = unpack_meta(step)
        shape = (meta.num_rows, self._model.spec.hidden_size)
        residual = torch.empty(shape, dtype=self._dtype)
        normed = torch.empty(shape, dtype=self._dtype)
        self._before.read(residual)
        self._before.read(normed)
        began_s = time.perf_counter()
        done: tuple[Tensor, Tensor] | None = None
        tokens: tuple[tuple[Token, ...], ...] = ()
        error = ""

        def on_layer(layer: int) -> None:
            self._control.sendall(frame(LayerDone(number=step.number, layer=layer)))

        try:
            with torch.inference_mode():
                done = self._advance(residual, normed, step, meta, on_layer)
                if step.draws and done is not None:
                    tokens = self._tokens(step, done[1])
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

    def _tokens(self, step: StageStep, states: Tensor) -> tuple[tuple[Token, ...], ...]:
        """Returns the tokens that the last stage draws, by draw. An embedding is the state of its
        only row.

        states: the wanted rows, [W, hidden], in the order of the draws.
        """
        draws = unpack_draws(step, self._model.spec.eos_token_ids)
        sizes = [1 + len(draw.drafts) for draw in draws]
        rows = dict(enumerate(states.split(sizes)))
        drawing = [i for i, draw in enumerate(draws) if draw.params.pooling == "none"]
        found: dict[int, tuple[Token, ...]] = {
            i: (pool_last(rows[i][0]),) for i in rows if i not in drawing
        }
        if drawing:
            logits = self._model.logits(torch.cat([rows[i] for i in drawing]))
            positions = [step.draws[i].position for i in drawing]
            drawn = sample(logits, [draws[i] for i in drawing], positions, self._grammars)
            found |= dict(zip(drawing, drawn, strict=True))
        return tuple(found[i] for i in range(len(draws)))

    def _advance(
        self,
        residual: Tensor,
        normed: Tensor,
        step: StageStep,
        meta: StepMeta,
        on_layer: Callable[[int], None],
    ) -> tuple[Tensor, Tensor] | None:
        """Runs `DecoderModel.advance`. When it returns, all KVCache of this stage is in the arena.

        residual, normed: [T, hidden].
        """
        wanted = unpack_wanted(step)
        if wanted is not None:
            wanted = wanted.to(self._device)
        announce = layer_done = on_layer if step.announced else None
        if self._host_sync is not None:
            layer_done = self._host_sync.begin(meta, step.announced)
        rows = residual.to(self._device), normed.to(self._device)
        done = self._model.advance(*rows, self._cache, meta, wanted, layer_done)
        if self._host_sync is not None:
            self._host_sync.end(announce)
        return done
