"""The ranks of one machine through memory that all of them have mapped.

It has no name and only the ranks inherit it, so nobody else can come to a meeting. A message costs
what the machine needs to show one core what another wrote, where gloo's goes through two sockets
and two threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.engine.native.meetings import Meetings, open_meetings
from moonpool.engine.native.rings import Waiter
from moonpool.engine.tensor.group import SILENCE_S, RankLostError, add_up

BUFFER_BYTES = 1 << 20
"""Of a rank, twice; what is larger goes in pieces, while the others read the last one."""
SPIN_S = 200e-6
"""Ranks do the same work, so the others are soon there."""


def create_meeting(num_ranks: int) -> int | None:
    """A descriptor of memory for ranks to meet in; None where they cannot."""
    meetings = open_meetings()
    if meetings is None or not (size := meetings.size(num_ranks, BUFFER_BYTES)):
        return None
    fd = os.memfd_create("moonpool-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


class MemoryGroup:
    """`fd` is of `create_meeting`, and stays its owner's."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.waited_s = 0.0  # in all sums: the others' time and the transport's
        meetings = open_meetings()
        assert meetings is not None, "the ranks are one installation"
        self._meetings: Meetings = meetings
        self._memory = torch.frombuffer(
            mmap.mmap(fd, meetings.size(num_ranks, BUFFER_BYTES)), dtype=torch.uint8
        )
        self._rank = rank
        self._waiter = Waiter(spin_ns=int(SPIN_S * 1e9))

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        mine = add_up(parts)
        began_s = time.perf_counter()
        everyone = mine.new_empty(self.num_ranks, *mine.shape)
        self._meet(mine.contiguous(), everyone, self.num_ranks)
        total = add_up(everyone.unbind())
        self.waited_s += time.perf_counter() - began_s
        return total

    def share(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self._meet(tensor, tensor, 1)

    def meet(self) -> None:
        nothing = self._memory[:0]
        self._meet(nothing, nothing, 0)

    def end(self) -> None:
        """From any thread: nobody waits for the others any more."""
        self._meetings.end(self._memory.data_ptr())

    def _meet(self, mine: Tensor, out: Tensor, senders: int) -> None:
        missing = self._meetings.meet(
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
            raise RankLostError("a rank is gone, or has fallen silent")
