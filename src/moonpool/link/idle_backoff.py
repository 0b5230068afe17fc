"""Decides when a periodic task of an idle process takes its next turn.

Each turn costs a wake-up of the process, and often a wake-up of the process to which it sends. An
idle cluster would spend most of its CPU time on these wake-ups.
"""

from __future__ import annotations

import asyncio

IDLE_TURNS = 20
"""Turns without work after which the task slows down once more."""


class IdleBackoff:
    """Sleeps `busy_s` between turns while there is work, `idle_s` soon after, then `quiet_s`."""

    def __init__(self, busy_s: float, idle_s: float, quiet_s: float) -> None:
        self._busy_s = busy_s
        self._idle_s = idle_s
        self._quiet_s = quiet_s
        self._num_idle = 0
        self._work = asyncio.Event()

    def note(self) -> None:
        """Notes that there is work: a turn is due in `busy_s`, and one more after the last call."""
        self._work.set()

    async def next(self, is_busy: bool, at_most_s: float = float("inf")) -> None:
        """Returns when the next turn is due; without work, after `at_most_s` at the latest."""
        if not is_busy and not self._work.is_set():
            self._num_idle += 1
            pause_s = self._idle_s if self._num_idle <= IDLE_TURNS else self._quiet_s
            try:
                async with asyncio.timeout(min(pause_s, at_most_s)):
                    await self._work.wait()
            except TimeoutError:
                return
        self._work.clear()
        self._num_idle = 0
        await asyncio.sleep(self._busy_s)
