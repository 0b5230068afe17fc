"""Follows the prefixes of a trace: how much of each prompt was seen before, and which row a turn
follows.

Holds one entry per distinct block. It decides nothing; characterisation and fitting read it.
"""

from __future__ import annotations

from moonpool.trace.row import TraceRow

MIN_FOLLOW_UP_BLOCKS = 2
"""Leading blocks that must be known before a row counts as a turn of an earlier one: the first
block of many services is a system prompt that all share."""


class Turn:
    """One row as seen by the tracker. `parent` is the row whose prompt it continues."""

    __slots__ = ("arrived_s", "hit_blocks", "index", "input_tokens", "output_tokens")

    def __init__(self, row: TraceRow, hit_blocks: int, index: int) -> None:
        self.arrived_s = row.arrived_s
        self.input_tokens = row.input_tokens
        self.output_tokens = row.output_tokens
        self.hit_blocks = hit_blocks
        self.index = index  # 1: a first turn


class TurnTracker:
    """Rows in order of time go in; for each, its turn and the turn before it come out.

    A block's last user is the row that a match ending in that block continues.
    """

    def __init__(self, min_blocks: int = MIN_FOLLOW_UP_BLOCKS) -> None:
        self._last_user: dict[int, Turn] = {}
        self._min_blocks = min_blocks

    def last_use_s(self, block: int, now_s: float) -> float:
        """Seconds since the last row with this block arrived; 0 if there was none before this."""
        user = self._last_user.get(block)
        return now_s - user.arrived_s if user is not None else 0.0

    def add(self, row: TraceRow) -> tuple[Turn, Turn | None]:
        users = self._last_user
        hit_blocks = 0
        previous: Turn | None = None
        for block in row.hash_ids:
            user = users.get(block)
            if user is None:
                break
            previous = user
            hit_blocks += 1
        if hit_blocks < self._min_blocks:
            previous = None
        turn = Turn(row, hit_blocks, previous.index + 1 if previous else 1)
        for block in row.hash_ids:
            users[block] = turn
        return turn, previous
