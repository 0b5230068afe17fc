"""A rank's own process: its shards of every layer, over the instance's one arena.

It decides nothing, and ends when the first rank does, however that ends.
"""

from __future__ import annotations

import gc
import logging
import socket
import threading

import numpy as np
import torch

from moonpool.engine.builtin import open_model
from moonpool.engine.runner import choose_ops, make_layout
from moonpool.engine.stages.process import end_with, map_arena, pin
from moonpool.engine.stages.wire import (
    RankSetup,
    StageFailed,
    StageReady,
    StageStep,
    frame,
    receive_setup,
    receive_step,
    unpack_meta,
)
from moonpool.engine.tensor.group import RankLostError
from moonpool.engine.tensor.model import ShardedModel
from moonpool.engine.tensor.ranks import RankOptions, join_group
from moonpool.engine.tensor.shards import load_shards

MAX_FDS = 2  # the arena, and where ranks meet, or leave their addresses
log = logging.getLogger("moonpool.rank")


def run_rank(control: socket.socket) -> None:
    """Serves the first rank at the other end of `control` until it is gone."""
    threading.Thread(target=end_with, args=(control,), name="watch", daemon=True).start()
    try:
        setup, fds = receive_setup(control, MAX_FDS, RankSetup)
        try:
            rank = _Rank(setup, fds, control)
        except (ValueError, OSError, MemoryError) as error:
            control.sendall(frame(StageFailed(message=str(error))))
            return
        gc.collect()
        gc.freeze()
        while True:
            rank.run(receive_step(control))
    except (ConnectionError, RankLostError) as error:
        log.info("ending: %s", error)  # the first rank knows, or is gone


class _Rank:
    """Is ready before it meets the others. Raises ValueError, OSError, RankLostError."""

    def __init__(self, setup: RankSetup, fds: list[int], control: socket.socket) -> None:
        pin(setup.cores)
        torch.set_num_threads(setup.threads)
        model = open_model(setup.model, setup.dtype)
        ops = choose_ops(model.dtype, quantization=setup.quantization)
        layout = make_layout(model, setup.block_tokens, ops, setup.num_shards)
        if layout.fingerprint != setup.fingerprint:
            raise ValueError("the ranks do not compute alike: are they one installation?")
        arena_fd, group_fd = fds
        self._cache = map_arena(arena_fd, layout, setup.num_blocks)
        own = RankOptions(setup.num_ranks, setup.num_shards).shards_of(setup.rank)
        with torch.inference_mode():
            shards = load_shards(model.spec, model.weights, ops, own, setup.num_shards)
        control.sendall(frame(StageReady()))
        group = join_group(group_fd, setup.rank, setup.num_ranks, setup.secret)
        self._model = ShardedModel(shards, own, setup.num_shards, group)

    def run(self, step: StageStep) -> None:
        """Raises ConnectionError or RankLostError when another rank is gone. Whatever else it
        raises ends this rank, and so the instance: the others are in the middle of the step."""
        wanted = None
        if step.wanted:
            wanted = torch.from_numpy(np.frombuffer(step.wanted, np.int64).copy())
        with torch.inference_mode():
            self._model.follow(self._cache, unpack_meta(step), wanted)
