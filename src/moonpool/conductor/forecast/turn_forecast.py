"""Learns after how many seconds the next turn of a session comes.

A class of sessions has the same number of turns so far and the same range of its last pause. For
each class and range of ages the forecast counts the sessions that reached the age, and those whose
next turn came at that age. Their ratios give the survival curve: the share of sessions still
without a next turn. A class with little history is drawn towards the curve of all sessions.
"""

from __future__ import annotations

from bisect import bisect_right
from math import log

AGE_LIMITS_S = tuple(0.25 * 2 ** (step / 2) for step in range(29))
"""Upper ends of the ranges of ages, from 0.25 s to 68 min; the last range is open."""
NUM_RANGES = len(AGE_LIMITS_S) + 1
PRIOR_SESSIONS = 20.0
"""Weight of all sessions in the curve of a class, in sessions of the class's own history."""
PRIOR_SHARE = 0.03
"""Prior without any history: the share of sessions that continue in one range of ages."""
MAX_SESSIONS = 2000.0
"""Counts of a range are halved when they reach this: old sessions fade."""
PAUSE_LIMITS_S = (1.0, 4.0, 16.0, 64.0, 256.0)
MAX_TURNS = 3

SessionClass = tuple[int, int]


def session_class(num_turns: int, pause_s: float | None) -> SessionClass:
    """`num_turns` so far; `pause_s` before the last of them, None for a first turn."""
    pause = -1 if pause_s is None else bisect_right(PAUSE_LIMITS_S, pause_s)
    return min(num_turns, MAX_TURNS), pause


class _Curve:
    """Sessions of one class by range of ages."""

    __slots__ = ("ended", "returned")

    def __init__(self) -> None:
        # number of sessions whose time in each range of ages has ended, by its end or by a next
        # turn
        self.ended = [0.0] * NUM_RANGES
        self.returned = [0.0] * NUM_RANGES

    def add(self, number: int, returned: bool) -> None:
        self.ended[number] += 1
        self.returned[number] += returned
        if self.ended[number] > MAX_SESSIONS:
            self.ended[number] /= 2
            self.returned[number] /= 2


class TurnForecast:
    """The curves of all classes."""

    def __init__(self) -> None:
        self._all = _Curve()
        self._classes: dict[SessionClass, _Curve] = {}

    def note_returned(self, of: SessionClass, age_s: float) -> None:
        """Notes that a session's next turn came at this age."""
        self._add(of, bisect_right(AGE_LIMITS_S, age_s), True)

    def note_passed(self, of: SessionClass, number: int) -> None:
        """Notes that a session reached the end of this range of ages without a next turn."""
        self._add(of, number, False)

    def _add(self, of: SessionClass, number: int, returned: bool) -> None:
        self._all.add(number, returned)
        self._classes.setdefault(of, _Curve()).add(number, returned)

    def rate_per_s(self, of: SessionClass, age_s: float) -> float:
        """The expected next turns per second of a session of this age."""
        number = min(bisect_right(AGE_LIMITS_S, age_s), NUM_RANGES - 2)
        start_s = AGE_LIMITS_S[number - 1] if number else 0.0
        share = min(self._share(of, number), 0.999)
        return -log(1.0 - share) / (AGE_LIMITS_S[number] - start_s)

    def chance(self, of: SessionClass, age_s: float, within_s: float) -> float:
        """The probability of a next turn within this time from now."""
        left, end_s = 1.0, age_s + within_s
        while age_s < end_s:
            number = bisect_right(AGE_LIMITS_S, age_s)
            if number == NUM_RANGES - 1:
                break
            start_s = AGE_LIMITS_S[number - 1] if number else 0.0
            until_s = min(end_s, AGE_LIMITS_S[number])
            part = (until_s - age_s) / (AGE_LIMITS_S[number] - start_s)
            left *= (1.0 - min(self._share(of, number), 0.999)) ** part
            age_s = until_s
        return 1.0 - left

    def _share(self, of: SessionClass, number: int) -> float:
        """Of the sessions that reach a range of ages, the share whose next turn comes within this
        range."""
        overall = _ratio(self._all, number, PRIOR_SHARE)
        curve = self._classes.get(of)
        return overall if curve is None else _ratio(curve, number, overall)


def _ratio(curve: _Curve, number: int, prior: float) -> float:
    return (curve.returned[number] + PRIOR_SESSIONS * prior) / (
        curve.ended[number] + PRIOR_SESSIONS
    )
