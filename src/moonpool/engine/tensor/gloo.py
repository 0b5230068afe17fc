"""The ranks of one machine through torch.distributed's gloo.

Gloo listens on free ports of the loopback interface while the ranks find each other, and asks
nobody who connects for anything. So the addresses are told in memory without a name, which only
the ranks have, and then each rank proves to the others, over the very connections that are used
later, that it knows the instance's secret. Whoever else got in makes the start fail.
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

from moonpool.engine.tensor.group import SILENCE_S, RankLostError, add_up

LOOPBACK = "127.0.0.1"
_PROOF_BYTES = 32


def create_store() -> int:
    """A descriptor of memory in which ranks leave their addresses."""
    return os.memfd_create("moonpool-ranks", os.MFD_CLOEXEC)


class GlooGroup:
    """All ranks must make theirs at the same time. `store_fd` is taken over and never closed: the
    store writes there once more when it is freed, whoever has that number then. Raises
    RankLostError, also if one of the ranks does not know `secret`."""

    def __init__(self, store_fd: int, rank: int, num_ranks: int, secret: bytes) -> None:
        self.num_ranks = num_ranks
        self.waited_s = 0.0  # in all sums: the others' time and the transport's
        self._rank = rank
        # A group of our own, not torch's one per process; its stubs lack half of it.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=SILENCE_S)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        try:
            store = FileStore(f"/proc/self/fd/{store_fd}", num_ranks)
            self._group = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise RankLostError(f"the ranks do not find each other: {_line(error)}") from None
        self._prove(secret)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        mine = add_up(parts)
        began_s = time.perf_counter()
        total = add_up(self._gather(mine).chunk(self.num_ranks))
        self.waited_s += time.perf_counter() - began_s
        return total

    def share(self, tensor: Tensor) -> None:
        try:
            self._group.broadcast([tensor]).wait()
        except RuntimeError as error:
            raise RankLostError(f"a rank is gone: {_line(error)}") from None

    def meet(self) -> None:
        self._gather(torch.zeros(1, 1))

    def end(self) -> None:
        """The connections of one that is gone are closed: nobody waits for it."""

    def _gather(self, mine: Tensor) -> Tensor:
        """[rows, ...] of each rank -> [ranks * rows, ...]. Not gloo's own sum: that adds up in an
        order that depends on where in the tensor a number lies."""
        everyone = mine.new_empty(self.num_ranks * mine.shape[0], *mine.shape[1:])
        try:
            self._group._allgather_base(everyone, mine).wait()
        except RuntimeError as error:
            raise RankLostError(f"a rank is gone: {_line(error)}") from None
        return everyone

    def _prove(self, secret: bytes) -> None:
        """Each to each, along both ways that tensors take later."""
        nonce = torch.frombuffer(bytearray(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8)
        nonces = self._gather(nonce.view(1, -1)).numpy().tobytes()
        proofs = self._gather(_proof(secret, self._rank, nonces).view(1, -1))
        for rank in range(self.num_ranks):
            self._check(proofs[rank], _proof(secret, rank, nonces))
        shared = _proof(secret, 0, nonces)
        if self._rank:
            shared.zero_()
        self.share(shared)
        self._check(shared, _proof(secret, 0, nonces))

    def _check(self, proof: Tensor, expected: Tensor) -> None:
        if not hmac.compare_digest(proof.numpy().tobytes(), expected.numpy().tobytes()):
            raise RankLostError("somebody else has connected in a rank's place")


def _proof(secret: bytes, rank: int, nonces: bytes) -> Tensor:
    digest = hmac.digest(secret, rank.to_bytes(4, "little") + nonces, hashlib.sha256)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
