"""Finds the call that a head's event loop was processing when the head ended."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping

from moonpool.api.connection.poison import MarkedStep, WorkMark
from moonpool.protocol.supervision import HUNG_STATUS, HeadsEnded

LONG_S = 5.0
"""A head that hangs works on one call for this long; otherwise no call is the cause."""
ORDERED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
MAX_REMEMBERED = 256


class OomKills:
    """Counts the processes that the kernel has killed for lack of memory."""

    def __init__(self) -> None:
        self._count = self._read()

    def is_new(self) -> bool:
        """Whether the kernel has killed a process since the last check."""
        before, self._count = self._count, self._read()
        return self._count > before

    @staticmethod
    def _read() -> int:
        try:
            with open("/proc/vmstat") as file:
                found = [line.split()[1] for line in file if line.startswith("oom_kill ")]
        except OSError:
            found = []
        return int(found[0]) if found else 0


def is_crash(status: int | None, is_out_of_memory: bool) -> bool:
    """Whether a process with this exit status has crashed: by a signal that nobody sends as an
    order, by a hang that it noticed itself, or because the kernel killed it for lack of memory. An
    error exit (status 1) is not a crash."""
    if status == -signal.SIGKILL:
        return is_out_of_memory
    return status == HUNG_STATUS or (status is not None and status < 0 and status not in ORDERED)


class Culprits:
    """The calls that ended heads, by their numbers."""

    def __init__(self, ended: Mapping[int, tuple[int, int]] | None = None) -> None:
        """`ended`: the numbers that an earlier program of this process knew."""
        self.ended: dict[int, tuple[int, int]] = dict(ended or {})
        """By the number of the call: how many heads it has hung or crashed, and how many were
        killed while they worked on it."""
        self.alike: deque[HeadsEnded] = deque(maxlen=MAX_REMEMBERED)
        self._mark: WorkMark | None = None
        self._hung: MarkedStep | None = None
        self._is_spared = False
        self._oom_kills = OomKills()

    def watch(self, fd: int) -> None:
        """Reads from now on which call the present head processes. Owns `fd`."""
        self._begin()
        try:
            self._mark = WorkMark(fd)
        finally:
            os.close(fd)

    def of(self, number: int) -> tuple[int, int]:
        return self.ended.get(number, (0, 0))

    def forget(self, number: int) -> None:
        """Notes that the call has ended."""
        self.ended.pop(number, None)

    def is_working(self) -> bool:
        """Whether the process has just begun to work on a call: its loop still runs, though
        slowly."""
        work = None if self._mark is None else self._mark.read()
        return work is not None and time.monotonic() - work.since_s < LONG_S

    def note_hang(self) -> None:
        """Notes that the head does not respond and will be killed."""
        self._hung = None if self._mark is None else self._mark.read()
        if self._hung is not None and time.monotonic() - self._hung.since_s < LONG_S:
            self._hung = None
        self._is_spared = self._hung is None

    def spare(self) -> None:
        """Notes that the head will be killed for a reason other than a call."""
        self._is_spared = True

    def judge(self, status: int | None, present: Iterable[int]) -> int | None:
        """Notes that the head has ended with this status. Returns the number of the call on which
        the head was working when it ended, if that is one of the `present` calls."""
        work = self._hung or (None if self._mark is None else self._mark.read())
        hung, is_spared = self._hung is not None, self._is_spared or status in (0, *ORDERED)
        out_of_memory = self._oom_kills.is_new()
        self._begin()
        if work is None or is_spared or work.number not in present:
            return None
        num_ended, num_killed = self.of(work.number)
        if hung or out_of_memory or status not in (None, -signal.SIGKILL):
            num_ended += 1
        else:
            num_killed += 1
        self.ended[work.number] = num_ended, num_killed
        return work.number

    def _begin(self) -> None:
        if self._mark is not None:
            self._mark.close()
        self._mark = self._hung = None
        self._is_spared = False
