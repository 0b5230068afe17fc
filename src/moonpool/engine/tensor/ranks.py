"""The other ranks of an instance, seen from the first: started, told of every step, and ended.

Blocks are whole blocks of one arena, into which each rank writes its shards' part: the cache, the
messenger and the disk know nothing of ranks. Never decides what runs.
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

from moonpool.config import Quantization
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.ops import KvCache, Ops, StepMeta
from moonpool.engine.runner import Engine
from moonpool.engine.spec import ModelError
from moonpool.engine.stages.fellows import END_S, Fellow, start_fellow
from moonpool.engine.stages.wire import RankSetup, pack_step
from moonpool.engine.tensor.gloo import GlooGroup, create_store
from moonpool.engine.tensor.group import Alone, Group, RankLostError
from moonpool.engine.tensor.memory import MemoryGroup, create_meeting
from moonpool.engine.tensor.model import ShardedModel
from moonpool.engine.tensor.shards import check_shards, load_shards


@dataclass(frozen=True, slots=True)
class RankOptions:
    """`num_shards`: of the cluster, a multiple of `num_ranks`. `threads`: of each rank. `cores`:
    which the engine has, for the ranks to share out; (): any."""

    num_ranks: int
    num_shards: int
    threads: int = 1
    quantization: Quantization = "none"
    cores: tuple[int, ...] = ()

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """None of another rank's, if there are enough."""
        share = len(self.cores) // self.num_ranks
        return self.cores[rank * share : (rank + 1) * share] if share else self.cores

    def shards_of(self, rank: int) -> range:
        share = self.num_shards // self.num_ranks
        return range(rank * share, (rank + 1) * share)


def check_ranks(model: LoadedModel, num_ranks: int, num_shards: int) -> None:
    """Raises ModelError for what cannot be."""
    check_shards(model.spec, num_shards)
    if num_shards % num_ranks:
        raise ModelError(
            f"the cluster's blocks are of {num_shards} shards, which {num_ranks} ranks cannot"
            f" share out: use --tensor-parallel-size {num_shards}, or start the head with a larger"
            " one"
        )


def sharded_engine(model: LoadedModel, ops: Ops, cache: KvCache, num_shards: int) -> Engine:
    """One process that computes all shards. Raises ModelError."""
    own = range(num_shards)
    with torch.inference_mode():
        shards = load_shards(model.spec, model.weights, ops, own, num_shards)
    return Engine(model, ops, cache, sharded=ShardedModel(shards, own, num_shards, Alone()))


class Ranks:
    """To be made before anybody seals the arena behind `cache` and `arena_fd`. All ranks compute
    the steps of `engine`, which is the first one's. `on_lost` is called once, from a thread, if a
    rank ends that should not. Raises ValueError, StageLostError."""

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
        self.cores = options.cores_of(0)  # for the thread that computes
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards what follows
        self._lost = ""
        self._closing = False
        self._number = 0
        self.group: Group | None = None
        meeting_fd = create_meeting(options.num_ranks)
        group_fd = create_store() if meeting_fd is None else meeting_fd
        secret = b"" if meeting_fd is not None else secrets.token_bytes(32)
        self._fellows: list[Fellow] = []
        try:
            for rank in range(1, options.num_ranks):
                setup = _setup(model, cache, options, rank, secret)
                name = f"rank {rank + 1} of {options.num_ranks}"
                command = ["rank", "--of", owner, "--number", str(rank + 1)]
                fds = [arena_fd, group_fd]
                self._fellows.append(start_fellow(name, command, setup, fds, options.threads))
            own = options.shards_of(0)
            with torch.inference_mode():
                shards = load_shards(model.spec, model.weights, ops, own, options.num_shards)
            for fellow in self._fellows:
                fellow.wait_until_ready()
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
        """Of the ranks that are processes of their own."""
        return [fellow.process.pid for fellow in self._fellows]

    def close(self) -> None:
        """Ends the other ranks."""
        with self._lock:
            self._closing = True
        self._hang_up()
        by_s = time.monotonic() + END_S
        for fellow in self._fellows:
            fellow.end(by_s)

    def _announce(self, meta: StepMeta, wanted: Tensor | None) -> None:
        step = pack_step(self._number, meta, announced=False)
        self._number += 1
        if wanted is not None:
            step = msgspec.structs.replace(step, wanted=wanted.numpy().tobytes())
        try:
            for fellow in self._fellows:
                fellow.send(step)
        except OSError as error:
            raise RankLostError(self._lost or f"a rank is gone: {error}") from None

    def _give_up(self, message: str) -> None:
        with self._lock:
            self._lost = self._lost or message
        self._hang_up()

    def _hang_up(self) -> None:
        for fellow in self._fellows:
            fellow.hang_up()
        if self.group is not None:
            self.group.end()

    def _watch(self) -> None:
        """Until the first of the ranks ends; they say nothing once they are ready."""
        with selectors.DefaultSelector() as selector:
            for fellow in self._fellows:
                selector.register(fellow.control, selectors.EVENT_READ, fellow)
            gone: Fellow = selector.select()[0][0].data
        with self._lock:
            self._lost = self._lost or f"{gone.name} (process {gone.process.pid}) has ended"
            closing = self._closing
        self._hang_up()  # so that nobody waits for the one that is gone
        if not closing:
            self._on_lost(self._lost)


def join_group(fd: int, rank: int, num_ranks: int, secret: bytes) -> Group:
    """With a `secret` through gloo, else through memory that all ranks have mapped. Takes `fd`
    over. Raises RankLostError."""
    if secret:
        return GlooGroup(fd, rank, num_ranks, secret)
    try:
        return MemoryGroup(fd, rank, num_ranks)
    finally:
        os.close(fd)


def _setup(
    model: LoadedModel, cache: KvCache, options: RankOptions, rank: int, secret: bytes
) -> RankSetup:
    return RankSetup(
        model=model.name,
        dtype=model.dtype,
        quantization=options.quantization,
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
