"""Forms in which no single line tells what a call waits for. The rows of such files are kept in
memory.

* AIPerf's `dag_jsonl`: sessions that fork and spawn others, which stand in other lines.
* Dynamo's own request traces (`dynamo.request.trace.v1`): a line for each answer, at its end.
* Exports of OpenTelemetry (`resourceSpans`): a line for each batch of spans, of any programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from itertools import pairwise

from moonpool.trace.programs import CallOrder
from moonpool.trace.row import LineError, ParsedRow

MAX_GATHERED = 2_000_000
"""Calls, sessions and other spans of a file that is kept in memory."""


class Gatherer(ABC):
    """Gets all lines of a file, and then gives the rows."""

    _num_kept = 0
    format: str
    block_tokens: int  # known after the last line; 0 means that there are no hashes
    units_per_s: float
    other_lines: int
    """Lines that are not requests."""

    @abstractmethod
    def add(self, line: bytes) -> None:
        """Takes the next line. Raises LineError."""

    def keep(self) -> None:
        """Counts one more thing that is kept in memory. Raises LineError."""
        self._num_kept += 1
        if self._num_kept > MAX_GATHERED:
            raise LineError(f"more than {MAX_GATHERED:,} calls: split the file")

    @abstractmethod
    def rows(self) -> Iterable[ParsedRow]:
        """Yields the rows, each after the rows that it waits for. Raises LineError."""


class GatheredRows:
    """All rows of a file, in order of the times at which their programs begin."""

    def __init__(self, gatherer: Gatherer) -> None:
        """Raises LineError."""
        order = CallOrder(gatherer.units_per_s, gatherer.block_tokens)
        self.skipped_rows = 0
        found: list[ParsedRow] = []
        for row in gatherer.rows():
            placed = order.place(row)
            if placed is None:
                self.skipped_rows += 1
                continue
            found.append(placed)
        self.rows = sorted(found, key=lambda row: row.time)
        self.has_programs = order.has_programs
        self.is_sorted = all(one.time <= other.time for one, other in pairwise(found))

    def head_times(self, number: int) -> array[float]:
        """The first times, from the first one on."""
        return array("d", (row.time - self.rows[0].time for row in self.rows[:number]))
