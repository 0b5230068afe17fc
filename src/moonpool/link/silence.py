"""Tells a silent worker from a head that did not listen.

A head that was stopped, swapped out or busy for long has read no messages in that time. Silence is
therefore measured on a clock that hardly moves during such a gap.
"""

from __future__ import annotations

MAX_TURN_S = 3.0
"""The most that one turn of the head's loop counts as listening: longer than its longest pause."""


class ListeningClock:
    """Seconds for which the head listened. `tick` is called in every turn of the clock's ticker."""

    def __init__(self, now: float, most_s: float = MAX_TURN_S) -> None:
        """`most_s`: the most seconds that one turn counts."""
        self.listened_s = 0.0
        self._last_s = now
        self._most_s = most_s

    def tick(self, now: float) -> float:
        """Advances the clock. Returns the seconds of this turn that it left out."""
        turn_s = now - self._last_s
        self._last_s = now
        counted_s = min(max(turn_s, 0.0), self._most_s)
        self.listened_s += counted_s
        return max(turn_s - counted_s, 0.0)
