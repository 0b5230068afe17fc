"""Collective operations between the ranks of an instance, and the shared-memory implementation.

The sum over all shards is a binary tree of single additions, ordered by shard number. A sum has the
same bits for every assignment of shards to ranks, as long as each rank's shards form a subtree.

`ShmGroup` runs over anonymous memory that only the ranks inherit, so no other process can take
part. A message costs one transfer of cache lines between cores; gloo takes two sockets and two
threads (`tensor_gloo`, used where the kernels are missing). Figures: docs/decisions/parallelism.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moonpool_engine.engine.native.shared_memory import ShmAllgather, Waiter, open_allgather
from moonpool_engine.engine.parallel.process_group import StageLostError

SILENCE_S = 120.0
"""How long a rank waits for another one, between steps and in the middle of one."""
BUFFER_BYTES = 1 << 20
"""Size of a rank's buffer; each rank has two. Larger tensors are sent in pieces: the other ranks
read one piece while the rank writes the next."""
SPIN_S = 200e-6
"""How long a rank spins before it sleeps. Ranks do equal work, so the wait is usually short."""


class RankLostError(StageLostError):
    """The ranks cannot continue, because one of them has ended, failed or stopped responding."""


class Group(Protocol):
    """One rank's view of the group of all ranks. Every rank makes the same calls in the same order.
    Each call raises RankLostError if another rank does not take part."""

    num_ranks: int
    waited_s: float
    """Seconds spent in all sums: waiting for other ranks, and transport."""

    def all_reduce(self, parts: Sequence[Tensor]) -> Tensor:
        """Sums the parts of all ranks' shards and returns the sum to all ranks.

        The tensors of all ranks have one shape; the call may overwrite them.
        """
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the first rank's tensor to all ranks, in place."""
        ...

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        ...

    def abort(self) -> None:
        """Ends all waiting because a rank is lost. Any thread may call it."""
        ...


class SingleProcessGroup:
    """The group of an instance that computes all shards in one process."""

    num_ranks = 1
    waited_s = 0.0

    def all_reduce(self, parts: Sequence[Tensor]) -> Tensor:
        return add_up(parts)

    def broadcast(self, tensor: Tensor) -> None:
        """Does nothing, because there is no other rank."""

    def barrier(self) -> None:
        """Does nothing, because there is no other rank."""

    def abort(self) -> None:
        """Does nothing, because there is no other rank."""


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """((a + b) + (c + d)) ... over a power of two of tensors, rounded to their dtype at every `+`.
    Overwrites them."""
    level = list(parts)
    while len(level) > 1:
        level = [a.add_(b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def create_group_memory(num_ranks: int) -> int | None:
    """Returns a descriptor of memory for a `ShmGroup`, or None without kernels or with too many
    ranks."""
    allgather = open_allgather()
    if allgather is None or not (size := allgather.size(num_ranks, BUFFER_BYTES)):
        return None
    fd = os.memfd_create("moonpool-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


class ShmGroup:
    """A group over shared memory. `fd` comes from `create_group_memory`; the caller keeps it
    open."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.waited_s = 0.0
        allgather = open_allgather()
        assert allgather is not None, "all ranks run the same installation"
        self._allgather: ShmAllgather = allgather
        self._memory = torch.frombuffer(
            mmap.mmap(fd, allgather.size(num_ranks, BUFFER_BYTES)), dtype=torch.uint8
        )
        self._rank = rank
        self._waiter = Waiter(spin_ns=int(SPIN_S * 1e9))

    def all_reduce(self, parts: Sequence[Tensor]) -> Tensor:
        mine = add_up(parts)
        began_s = time.perf_counter()
        gathered = mine.new_empty(self.num_ranks, *mine.shape)
        self._gather(mine.contiguous(), gathered, self.num_ranks)
        total = add_up(gathered.unbind())
        self.waited_s += time.perf_counter() - began_s
        return total

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self._gather(tensor, tensor, 1)

    def barrier(self) -> None:
        nothing = self._memory[:0]
        self._gather(nothing, nothing, 0)

    def abort(self) -> None:
        self._allgather.abort(self._memory.data_ptr())

    def _gather(self, mine: Tensor, out: Tensor, senders: int) -> None:
        """Copies the tensors of the first `senders` ranks, in rank order, to `out` on all ranks."""
        missing = self._allgather.gather(
            self._memory.data_ptr(),
            BUFFER_BYTES,
            self._rank,
            self.num_ranks,
            senders,
            mine.data_ptr(),
            out.data_ptr(),
            mine.nbytes,
            ctypes.byref(self._waiter),
            int(SILENCE_S * 1e9),
        )
        if missing:
            raise RankLostError("another rank has ended or does not answer")
