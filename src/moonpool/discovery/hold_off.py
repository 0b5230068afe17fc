"""How long a server that comes and goes is left alone. Pure: it reads no clock."""

from __future__ import annotations

from moonpool.retry_delays import RetryDelays

HOLD_OFFS = RetryDelays((0.0, 5.0, 15.0, 60.0, 300.0), steady_s=60.0)
"""After short stays in a row: a first one costs nothing, for servers restart."""


class HoldOff:
    """The hold-off of one server."""

    def __init__(self) -> None:
        self._num_short = 0

    def after_stay(self, stay_s: float) -> float:
        """Returns how long a server that has left must not join, 0 or more seconds."""
        if stay_s >= HOLD_OFFS.steady_s:
            self._num_short = 0
            return 0.0
        self._num_short += 1
        return HOLD_OFFS.after(self._num_short)
