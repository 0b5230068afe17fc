"""Collective operations of the ranks of one machine over torch.distributed's gloo.

Used where the native kernels are missing. Over gloo, decodes of two ranks ran at 0.58 to 1.03 of
the speed of one process, against 1.14 to 1.66 over shared memory (docs/decisions/parallelism.md).

Gloo listens on free loopback ports without authentication while the ranks connect. Addresses are
therefore in anonymous memory that only the ranks inherit. Each rank then proves to the others, over
the connections used later, that it has the instance's secret. A foreign process makes the start
fail.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moonpool_engine.engine.parallel.tensor_group import SILENCE_S, RankLostError, add_up

LOOPBACK = "127.0.0.1"
_PROOF_BYTES = 32


def create_store() -> int:
    """Returns a descriptor of the memory through which ranks exchange their addresses."""
    return os.memfd_create("moonpool-ranks", os.MFD_CLOEXEC)


class GlooGroup:
    """A group of ranks over gloo. All ranks must create their groups at the same time.

    The group takes over `store_fd` and never closes it: torch's store writes to that number once
    more when it is freed. Raises RankLostError, for a rank that does not know `secret` too.
    """

    def __init__(self, store_fd: int, rank: int, num_ranks: int, secret: bytes) -> None:
        self.num_ranks = num_ranks
        self.waited_s = 0.0
        self._rank = rank
        # Torch's one default group per process is not used. The type stubs lack half of this API.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=SILENCE_S)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        try:
            store = FileStore(f"/proc/self/fd/{store_fd}", num_ranks)
            self._group = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise RankLostError(f"the ranks cannot connect to each other: {_line(error)}") from None
        self._prove(secret)

    def all_reduce(self, parts: Sequence[Tensor]) -> Tensor:
        mine = add_up(parts)
        began_s = time.perf_counter()
        total = add_up(self._gather(mine).chunk(self.num_ranks))
        self.waited_s += time.perf_counter() - began_s
        return total

    def broadcast(self, tensor: Tensor) -> None:
        """Raises RankLostError if another rank has ended."""
        try:
            self._group.broadcast([tensor]).wait()
        except RuntimeError as error:
            raise RankLostError(f"another rank has ended: {_line(error)}") from None

    def barrier(self) -> None:
        self._gather(torch.zeros(1, 1))

    def abort(self) -> None:
        """Does nothing: the connections of a rank that has ended are closed."""

    def _gather(self, mine: Tensor) -> Tensor:
        """[rows, ...] of each rank -> [ranks * rows, ...].

        Gloo's own all-reduce is not used: its order of addition depends on the position in the
        tensor.
        """
        gathered = mine.new_empty(self.num_ranks * mine.shape[0], *mine.shape[1:])
        try:
            self._group._allgather_base(gathered, mine).wait()
        except RuntimeError as error:
            raise RankLostError(f"another rank has ended: {_line(error)}") from None
        return gathered

    def _prove(self, secret: bytes) -> None:
        """Each rank proves to every other rank that it knows the secret, by all-gather and by
        broadcast."""
        nonce = torch.frombuffer(bytearray(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8)
        nonces = self._gather(nonce.view(1, -1)).numpy().tobytes()
        proofs = self._gather(_proof(secret, self._rank, nonces).view(1, -1))
        for rank in range(self.num_ranks):
            self._check(proofs[rank], _proof(secret, rank, nonces))
        shared = _proof(secret, 0, nonces)
        if self._rank:
            shared.zero_()
        self.broadcast(shared)
        self._check(shared, _proof(secret, 0, nonces))

    def _check(self, proof: Tensor, expected: Tensor) -> None:
        if not hmac.compare_digest(proof.numpy().tobytes(), expected.numpy().tobytes()):
            raise RankLostError("a foreign process has connected in place of a rank")


def _proof(secret: bytes, rank: int, nonces: bytes) -> Tensor:
    digest = hmac.digest(secret, rank.to_bytes(4, "little") + nonces, hashlib.sha256)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
