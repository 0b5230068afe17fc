"""The first rank's part of the tensor-parallel engine; it starts the other ranks.

Each rank writes its shards' part of every slice into one arena, so cache, messenger and disk see
whole blocks. The first rank sends every step to the other ranks. The first rank does not decide
which requests run.
"""

from __future__ import annotations

import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.ops import KvCache, Ops, StepMeta
from moonpool_engine.engine.parallel.process_group import END_S, PeerProcess, start_peer
from moonpool_engine.engine.parallel.stage_wire import RankSetup, pack_step
from moonpool_engine.engine.parallel.tensor_gloo import GlooGroup, create_store
from moonpool_engine.engine.parallel.tensor_group import (
    Group,
    RankLostError,
    ShmGroup,
    SingleProcessGroup,
    create_group_memory,
)
from moonpool_engine.engine.parallel.tensor_model import ShardedModel, check_shards, load_shards
from moonpool_engine.engine.runner import Engine


@dataclass(frozen=True, slots=True)
class RankOptions:
    """`num_shards` is the cluster's number of shards, a multiple of `num_ranks`. `threads` is the
    number of threads per rank. `cores` are the cores of the engine, to be divided between the
    ranks; () means any."""

    num_ranks: int
    num_shards: int
    threads: int = 1
    quantization: Quantization = "none"
    cores: tuple[int, ...] = ()

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """Returns disjoint cores per rank if there are enough, or else all cores."""
        share = len(self.cores) // self.num_ranks
        return self.cores[rank * share : (rank + 1) * share] if share else self.cores

    def shards_of(self, rank: int) -> range:
        """The shard numbers that `rank` computes."""
        share = self.num_shards // self.num_ranks
        return range(rank * share, (rank + 1) * share)


def check_ranks(model: LoadedModel, num_ranks: int, num_shards: int) -> None:
    """Raises ModelError if the model or the ranks cannot be divided into these shards."""
    check_shards(model.spec, num_shards)
    if num_shards % num_ranks:
        raise ModelError(
            f"the cluster's blocks are of {num_shards} shards, which {num_ranks} ranks cannot"
            f" share out: use --tensor-parallel-size {num_shards}, or start the head with a larger"
            " one"
        )


def sharded_engine(model: LoadedModel, ops: Ops, cache: KvCache, num_shards: int) -> Engine:
    """An engine of one process that computes all shards. Raises ModelError."""
    own = range(num_shards)
    with torch.inference_mode():
        shards = load_shards(model.spec, model.weights, ops, own, num_shards, model.adapters)
    return Engine(
        model, ops, cache, sharded=ShardedModel(shards, own, num_shards, SingleProcessGroup())
    )


class Ranks:
    """The ranks of an instance. All ranks compute the steps of `engine`.

    Create it before the arena behind `cache` and `arena_fd` is sealed. `on_lost` is called once,
    from another thread, if a rank ends unexpectedly. Raises ValueError, StageLostError.
    """

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        cache: KvCache,
        arena_fd: int,
        options: RankOptions,
        owner: str,
        on_lost: Callable[[str], None],
    ) -> None:
        check_ranks(model, options.num_ranks, options.num_shards)
        self.cores = options.cores_of(0)  # the cores of the thread that computes
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards the next three fields
        self._lost = ""
        self._closing = False
        self._number = 0
        self.group: Group | None = None
        memory_fd = create_group_memory(options.num_ranks)
        group_fd = create_store() if memory_fd is None else memory_fd
        secret = b"" if memory_fd is not None else secrets.token_bytes(32)
        self._peers: list[PeerProcess] = []
        try:
            for rank in range(1, options.num_ranks):
                setup = _setup(model, cache, options, rank, secret)
                name = f"rank {rank + 1} of {options.num_ranks}"
                command = ["rank", "--of", owner, "--number", str(rank + 1)]
                fds = [arena_fd, group_fd]
                self._peers.append(start_peer(name, command, setup, fds, options.threads))
            own = options.shards_of(0)
            with torch.inference_mode():
                shards = load_shards(
                    model.spec, model.weights, ops, own, options.num_shards, model.adapters
                )
            for peer in self._peers:
                peer.wait_until_ready()
            self.group = join_group(group_fd, 0, options.num_ranks, secret)
            sharded = ShardedModel(
                shards, own, options.num_shards, self.group, self._announce, self._give_up
            )
            self.engine = Engine(model, ops, cache, sharded=sharded)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks after the first."""
        return [peer.process.pid for peer in self._peers]

    def close(self) -> None:
        """Ends all other ranks."""
        with self._lock:
            self._closing = True
        self._end_peers()
        by_s = time.monotonic() + END_S
        for peer in self._peers:
            peer.end(by_s)

    def _announce(self, meta: StepMeta, wanted: Tensor | None) -> None:
        step = pack_step(self._number, meta, announced=False)
        self._number += 1
        if wanted is not None:
            step = msgspec.structs.replace(step, wanted=wanted.numpy().tobytes())
        try:
            for peer in self._peers:
                peer.send(step)
        except OSError as error:
            raise RankLostError(self._lost or f"a rank has ended: {error}") from None

    def _give_up(self, message: str) -> None:
        with self._lock:
            self._lost = self._lost or message
        self._end_peers()

    def _end_peers(self) -> None:
        for peer in self._peers:
            peer.ask_to_end()
        if self.group is not None:
            self.group.abort()

    def _watch(self) -> None:
        """Waits until one rank ends. Ranks send nothing after they are ready."""
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.control, selectors.EVENT_READ, peer)
            gone: PeerProcess = selector.select()[0][0].data
        with self._lock:
            self._lost = self._lost or f"{gone.name} (process {gone.process.pid}) has ended"
            closing = self._closing
        self._end_peers()  # no rank may wait for the lost rank
        if not closing:
            self._on_lost(self._lost)


def join_group(fd: int, rank: int, num_ranks: int, secret: bytes) -> Group:
    """Joins the other ranks: over gloo if a `secret` is given, or else over shared memory. Takes
    over `fd`. Raises RankLostError."""
    if secret:
        return GlooGroup(fd, rank, num_ranks, secret)
    try:
        return ShmGroup(fd, rank, num_ranks)
    finally:
        os.close(fd)


def _setup(
    model: LoadedModel, cache: KvCache, options: RankOptions, rank: int, secret: bytes
) -> RankSetup:
    return RankSetup(
        model=model.name,
        dtype=model.dtype,
        quantization=options.quantization,
        kv_dtype=model.kv_dtype,
        lora_modules=model.lora_modules,
        block_tokens=cache.layout.block_tokens,
        num_blocks=cache.blocks.shape[0],
        fingerprint=cache.layout.fingerprint,
        rank=rank,
        num_ranks=options.num_ranks,
        num_shards=options.num_shards,
        threads=options.threads,
        cores=options.cores_of(rank),
        secret=secret,
    )
