"""How long an endpoint that comes and goes is left out. Pure: it reads no clock."""

from __future__ import annotations

from collections import OrderedDict

WINDOW_S = 300.0
"""Departures are remembered for this long."""
FIRST_S, MOST_S = 5.0, 120.0
"""Time out of use after the second departure within the window, and at most; it doubles."""
MOST_NAMES = 65_536


class HoldOff:
    """All endpoints of a picker, by name. A first departure costs nothing: servers restart."""

    def __init__(self) -> None:
        self._left_s: OrderedDict[str, list[float]] = OrderedDict()  # the last to leave is last

    def note_left(self, name: str, now: float) -> None:
        left = self._recent(name, now)
        left.append(now)
        self._left_s[name] = left
        self._left_s.move_to_end(name)
        if len(self._left_s) > MOST_NAMES:
            self._left_s.popitem(last=False)

    def until_s(self, name: str, now: float) -> float:
        """When the endpoint may be used again; `now` or before if it may now."""
        left = self._recent(name, now)
        if len(left) < 2:
            return now
        return left[-1] + min(FIRST_S * 2.0 ** (len(left) - 2), MOST_S)

    def _recent(self, name: str, now: float) -> list[float]:
        return [each for each in self._left_s.get(name, ()) if now - each < WINDOW_S]
