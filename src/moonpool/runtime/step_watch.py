"""Notices an engine that hangs: a step under way that does not end in its time.

A process that dies is noticed at once, by the end of its socket. One that stands still, because it
was stopped or is caught in a call that does not return, says nothing. Owns how long a step is
waited for; ends nothing. Asks no clock: time is what the caller says has passed.
"""

from __future__ import annotations

from collections import deque

from moonpool.cost.model import Chunk, CostModel
from moonpool.workers.actions import RunStep, StepEntry

PATIENCE_S = 15.0
"""As long as a silent worker is waited for: it must outlast a machine that is briefly starved."""
OFFLOADED_PATIENCE_S = 120.0
"""Where steps wait for attention workers, which have deadlines of their own."""
SLOWER = 10.0
"""A step may take so many times what is expected of it: others may have the cores meanwhile."""


class StepWatch:
    """Steps end in the order in which they begin, so that the first of them is the one to watch."""

    def __init__(self, cost: CostModel, num_stages: int, patience_s: float = PATIENCE_S) -> None:
        """`cost` tells what a step costs one of so many stages."""
        self._cost = cost
        self._num_stages = num_stages
        self._patience_s = patience_s
        self._limits_s: deque[float] = deque()
        self._waited_s = 0.0  # for the first of them

    def begin(self, step: RunStep) -> None:
        chunks = [_chunk(entry) for entry in step.entries if _is_chunk(entry)]
        contexts = [entry.start + 1 for entry in step.entries if not _is_chunk(entry)]
        stage_s = self._cost.step_s(chunks, len(contexts), sum(contexts))
        self._limits_s.append(max(self._patience_s, SLOWER * self._num_stages * stage_s))

    def end(self) -> None:
        assert self._limits_s, "a step ended that had not begun"
        self._limits_s.popleft()
        self._waited_s = 0.0

    def wait(self, seconds: float) -> str | None:
        """So much time has passed: what hangs, None if nothing does."""
        if not self._limits_s:
            return None
        self._waited_s += seconds
        if self._waited_s <= self._limits_s[0]:
            return None
        return f"a step has not ended in {self._waited_s:.0f} s: the engine hangs"


def _is_chunk(entry: StepEntry) -> bool:
    return len(entry.new_token_ids) > 1 or not entry.generated


def _chunk(entry: StepEntry) -> Chunk:
    return Chunk(len(entry.new_token_ids), entry.start, 0, entry.draw is not None)
