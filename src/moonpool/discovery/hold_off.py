"""How long a server that comes and goes is left alone. Pure: it reads no clock."""

from __future__ import annotations

STEADY_S = 60.0
"""A server that stayed this long does not flap."""
HOLD_OFFS_S = (0.0, 5.0, 15.0, 60.0, 300.0)
"""After the first, second, ... short stay in a row: a first one costs nothing, for servers
restart."""


class HoldOff:
    """Of one server."""

    def __init__(self) -> None:
        self._num_short = 0

    def after_stay(self, stay_s: float) -> float:
        """Returns how long a server that has left must not join, 0 or more seconds."""
        if stay_s >= STEADY_S:
            self._num_short = 0
            return 0.0
        hold_s = HOLD_OFFS_S[min(self._num_short, len(HOLD_OFFS_S) - 1)]
        self._num_short += 1
        return hold_s
