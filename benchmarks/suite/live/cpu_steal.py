"""CPU time that other programs took while a live benchmark ran.

Stolen time slows the live figures and is missing from the profile, so each run reports it. The
stolen time comes from the kernel's counters, and is 0 where there are none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_IDLE, _IOWAIT, _NUM_TIMES = 3, 4, 8
"""Fields of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal."""
_USER_TICKS, _SYSTEM_TICKS = 11, 12
"""Fields of `/proc/PID/stat`, counted after the name."""


class BackgroundLoad:
    """Counts from its construction on; `pids`: further processes whose work counts as ours, besides
    this process."""

    def __init__(self, pids: Sequence[int], proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._pids = (*pids, os.getpid())
        self._began = self._read()

    def share(self) -> float:
        """The share of the processors' time so far that was neither idle nor used by this
        program."""
        busy, total, own = (now - then for now, then in zip(self._read(), self._began, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0) if total > 0 else 0.0

    def _read(self) -> tuple[int, int, int]:
        """Returns the busy and the total ticks of all processors, and the ticks of our
        processes."""
        try:
            line = (self._proc / "stat").read_text().partition("\n")[0]
        except OSError:
            return 0, 0, 0
        times = [int(word) for word in line.split()[1 : 1 + _NUM_TIMES]]
        total = sum(times)
        return total - times[_IDLE] - times[_IOWAIT], total, sum(map(self._ticks, self._pids))

    def _ticks(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return 0
        words = text.rpartition(")")[2].split()
        return int(words[_USER_TICKS]) + int(words[_SYSTEM_TICKS])
