"""Tells a silent worker from a head that did not listen, and finds processes that were stopped.

A head that was stopped, swapped out or busy for long has read nothing meanwhile. Silence is
therefore measured on a clock that hardly moves in such a gap.

A process that a signal (SIGSTOP) has stopped closes no connection, so its requests would wait until
its silence is noticed. One that a debugger has stopped is in another state, and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

MAX_TURN_S = 1.0
"""The most that one turn of the head's loop counts as listening."""
LOOK_S = 0.4
"""From one look at processes that may be stopped to the next."""
MOST_LOOKS = 3
"""A process that is stopped at so many looks in a row is not awaited any longer."""


class ListeningClock:
    """Seconds for which the head listened. `tick` is called in every turn of its ticker."""

    def __init__(self, now: float) -> None:
        self.listened_s = 0.0
        self._last_s = now

    def tick(self, now: float) -> float:
        """Advances the clock. Returns the seconds of this turn that it left out."""
        turn_s = now - self._last_s
        self._last_s = now
        counted_s = min(max(turn_s, 0.0), MAX_TURN_S)
        self.listened_s += counted_s
        return max(turn_s - counted_s, 0.0)


def process_state(pid: int) -> str:
    """Returns the letter of Linux's state of the process, "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


class StoppedProcesses:
    """Counts looks instead of seconds, because whoever looks may have been stopped, too."""

    def __init__(self, state_of: Callable[[int], str] = process_state) -> None:
        self._state_of = state_of
        self._num_looks: dict[int, int] = {}  # by process, only those that are stopped

    def look(self, pids: Iterable[int]) -> list[int]:
        """Returns the processes not to wait for any longer. Call it every LOOK_S."""
        stopped = [pid for pid in pids if self._state_of(pid) == "T"]
        self._num_looks = {pid: self._num_looks.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, num_looks in self._num_looks.items() if num_looks >= MOST_LOOKS]
