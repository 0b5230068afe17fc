"""An order of rows in which none comes before those that it waits for.

Files name the calls that a row waits for, and may have them in later lines. Rows without waits keep
the order of their times, and rows of a session that wait for the one before them that of their
session: by time where they have one, else by the file.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from moonpool.trace.row import UNTIMED, LaterCallError, LineError, ParsedRow


@dataclass(slots=True, eq=False)
class _Row:
    time: float
    after: tuple[str, ...]
    session: str
    follows: bool  # waits for the row before it in its session


@dataclass(slots=True, eq=False)
class CallGraph:
    """The rows of a file, by their numbers in it."""

    _rows: list[_Row] = field(default_factory=list)
    _named: dict[str, int] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)  # of sessions, at their last rows

    def add(self, row: ParsedRow) -> None:
        """Adds the next row of the file."""
        time = self._times.get(row.session, UNTIMED) if row.time == UNTIMED else row.time
        self._times[row.session] = time
        names = (*row.after, *row.alongside)
        follows = not names and (not row.call or row.delay_s is not None)
        if row.call:
            self._named.setdefault(row.call, len(self._rows))
        self._rows.append(_Row(time, names, row.session, follows))

    def order(self) -> list[int]:
        """The rows in their order. Raises RowError."""
        followers: list[list[int]] = [[] for _ in self._rows]
        missing = [0] * len(self._rows)
        last: dict[str, int] = {}
        for number in sorted(range(len(self._rows)), key=lambda one: (self._rows[one].time, one)):
            row = self._rows[number]
            before = [self._place(name, number) for name in row.after]
            if row.session:
                before += [last[row.session]] if row.follows and row.session in last else []
                last[row.session] = number
            missing[number] = len(before)
            for one in before:
                followers[one].append(number)
        return self._sorted(followers, missing)

    def _place(self, name: str, number: int) -> int:
        if name not in self._named:
            raise RowError(
                number, LaterCallError(f"it waits for the call {name!r:.60}, which no line has")
            )
        return self._named[name]

    def _sorted(self, followers: list[list[int]], missing: list[int]) -> list[int]:
        ready = [(self._rows[one].time, one) for one in range(len(missing)) if not missing[one]]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(number)
            for one in followers[number]:
                missing[one] -= 1
                if not missing[one]:
                    heapq.heappush(ready, (self._rows[one].time, one))
        if len(found) < len(missing):
            number = next(one for one, count in enumerate(missing) if count)
            raise RowError(number, LineError("it waits for calls that wait for it"))
        return found


class RowError(Exception):
    """What is wrong with a row, by its number."""

    def __init__(self, number: int, error: LineError) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error
