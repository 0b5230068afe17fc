"""When a refused client should come again: not all at once, and later the more are refused."""

from __future__ import annotations

MAX_RETRY_AFTER_S = 120.0
HALF_LIFE_S = 5.0
MAX_TRIES = 30.0
GOLDEN = 0.6180339887498949
"""Multiples of it modulo 1 are spread evenly, however many there are."""


class RetrySpread:
    """Counts what was admitted and refused lately."""

    def __init__(self) -> None:
        self._admitted = self._refused = 0.0
        self._at_s = 0.0
        self._number = 0

    def note_admitted(self, now: float) -> None:
        self._decay(now)
        self._admitted += 1.0

    def retry_after_s(self, wait_s: float, now: float) -> float:
        """Returns the time until the next try. `wait_s` is the predicted time until there is room.

        Of five requests that come for one place, four are refused again. They come within five such
        times, evenly spread, instead of all after one.
        """
        self._decay(now)
        self._refused += 1.0
        self._number += 1
        tries = min((self._admitted + self._refused) / max(self._admitted, 1.0), MAX_TRIES)
        base_s = max(wait_s, 1.0)
        spread_s = base_s * max(tries - 1.0, 0.0) * (self._number * GOLDEN % 1.0)
        return min(base_s + spread_s, MAX_RETRY_AFTER_S)

    def _decay(self, now: float) -> None:
        kept = 0.5 ** (max(now - self._at_s, 0.0) / HALF_LIFE_S)
        self._admitted *= kept
        self._refused *= kept
        self._at_s = now
