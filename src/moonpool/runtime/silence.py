"""Tells a silent worker from a head that did not listen.

A head that was stopped, swapped out or busy for long has read nothing meanwhile. Silence is
therefore measured on a clock that hardly moves in such a gap.
"""

from __future__ import annotations

MAX_TURN_S = 1.0
"""The most that one turn of the head's loop counts as listening."""


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
