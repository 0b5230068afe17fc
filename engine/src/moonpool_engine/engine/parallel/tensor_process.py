"""The process of a tensor-parallel rank: its shards of every layer, over the instance's one arena.

The rank makes no decisions, and ends when the first rank ends.
"""

from __future__ import annotations

import socket

import torch

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.parallel.process_group import map_arena, pin, run_peer
from moonpool_engine.engine.parallel.stage_wire import (
    RankSetup,
    StageArriving,
    StageStep,
    unpack_meta,
    unpack_wanted,
)
from moonpool_engine.engine.parallel.tensor_model import ShardedModel, load_shards
from moonpool_engine.engine.parallel.tensor_ranks import RankOptions, join_group
from moonpool_engine.engine.runner import choose_ops, make_layout

MAX_FDS = 2  # descriptors of the arena, and of the memory of the group (or of gloo's addresses)


def run_rank(control: socket.socket) -> None:
    """Serves the first rank, at the other end of `control`, until that rank ends."""
    run_peer(control, MAX_FDS, RankSetup, _Rank)


class _Rank:
    """Loads its shards first and joins the other ranks later. Raises ValueError, OSError."""

    def __init__(self, setup: RankSetup, fds: list[int]) -> None:
        pin(setup.cores)
        torch.set_num_threads(setup.threads)
        model = open_model(setup.model, setup.dtype, setup.lora_modules, setup.kv_dtype)
        ops = choose_ops(model.dtype, quantization=setup.quantization)
        layout = make_layout(model, setup.block_tokens, ops, setup.num_shards)
        if layout.fingerprint != setup.fingerprint:
            raise ValueError("the ranks compute with different kernels: use one installation")
        arena_fd, self._group_fd = fds
        self._cache = map_arena(arena_fd, layout, setup.num_blocks)
        self._setup = setup
        self._own = RankOptions(setup.num_ranks, setup.num_shards).shards_of(setup.rank)
        with torch.inference_mode():
            self._shards = load_shards(
                model.spec, model.weights, ops, self._own, setup.num_shards, model.adapters
            )

    def join(self) -> None:
        """Raises RankLostError."""
        setup = self._setup
        group = join_group(self._group_fd, setup.rank, setup.num_ranks, setup.secret)
        self._model = ShardedModel(self._shards, self._own, setup.num_shards, group)

    def handle(self, order: StageStep | StageArriving) -> None:
        """Computes one step. Raises ConnectionError or RankLostError if another rank has ended.

        Any other error ends this rank, and so the instance, because the other ranks are in the
        middle of the step.
        """
        assert isinstance(order, StageStep), "ranks compute on the CPU, in the arena itself"
        wanted = unpack_wanted(order)
        with torch.inference_mode():
            self._model.follow(self._cache, unpack_meta(order), wanted)
