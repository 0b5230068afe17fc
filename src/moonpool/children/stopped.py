"""Finds processes that were stopped.

A process that a signal (SIGSTOP) has stopped closes no connection, so its requests would wait until
its silence is noticed. A process that a debugger has stopped is in another state, and is left
alone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 0.4
"""Time between two checks for stopped processes, while one is stopped or requests run."""
QUIET_LOOK_S = 5.0
"""Time between two checks while nothing runs and no process was reported as stopped."""
MOST_LOOKS = 3
"""A process that is stopped at this many checks in a row is not waited for any longer."""


def process_state(pid: int) -> str:
    """Returns the letter of Linux's state of the process, "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped the process."""
    return process_state(pid) in ("T", "t")


class StoppedProcesses:
    """Counts checks instead of seconds, because the process that checks may have been stopped
    too."""

    def __init__(self, state_of: Callable[[int], str] = process_state) -> None:
        self._state_of = state_of
        # number of checks by process, only for stopped processes
        self._num_looks: dict[int, int] = {}

    @property
    def any_stopped(self) -> bool:
        """Whether the last check has found a stopped process."""
        return bool(self._num_looks)

    def look(self, pids: Iterable[int]) -> list[int]:
        """Returns the processes not to wait for any longer. Must be called every LOOK_S seconds."""
        stopped = [pid for pid in pids if self._state_of(pid) == "T"]
        self._num_looks = {pid: self._num_looks.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, num_looks in self._num_looks.items() if num_looks >= MOST_LOOKS]


class StopNotice:
    """Says when to check the children of this process. The kernel reports a child that was stopped
    (SIGCHLD), so an idle process need not check. If the loop or the thread cannot receive this
    signal, checks stay frequent."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._told.set()  # some processes may be stopped already
        self._quiet_s = QUIET_LOOK_S
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._told.set)
        except (RuntimeError, ValueError):  # raised by uvloop, or outside the main thread
            self._quiet_s = LOOK_S

    async def wait(self, any_stopped: bool) -> None:
        """Returns when the next check is due. `any_stopped`: whether the last check has found a
        stopped process."""
        if not any_stopped and not self._told.is_set():
            try:
                async with asyncio.timeout(self._quiet_s):
                    await self._told.wait()
            except TimeoutError:
                return
        self._told.clear()
        await asyncio.sleep(LOOK_S)
