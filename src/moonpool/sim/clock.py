"""Keeps virtual time as a heap of callbacks in the total order (time, priority, sequence).

Time is float seconds. The order is total and the same on every machine: times are finite IEEE
doubles and compare without tolerance, equal times are ordered by priority, and equal priorities by
sequence number, which is unique. NaN and infinity raise ValueError.

Life of a callback: waiting -> run | cancelled. A cancelled callback stays in the heap as a
tombstone until its time comes, or until tombstones are more than half of the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

MIN_HEAP_TO_COMPACT = 64


class Priority(IntEnum):
    """The order at one instant: events that free or break resources come before decisions."""

    FAULT = 0  # an instance lost at time t does nothing more at t
    TRANSFER_END = 1  # a step that starts at t can use bytes that arrive at t
    STEP_END = 2  # a step's end frees blocks and batch slots for requests at t
    MESSAGE = 3  # reports and commands come after steps and transfers
    ARRIVAL = 4  # the Conductor places a request after the reports of t
    TICK = 5  # samples and periodic decisions see all events of time t
    RERATE = 6  # link rates are computed once per instant, after all its changes


class Timer:
    """A scheduled callback, which can be cancelled."""

    __slots__ = ("args", "callback", "clock")

    def __init__(
        self, clock: Clock, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.clock = clock
        self.callback: Callable[..., object] | None = callback
        self.args = args

    @property
    def waiting(self) -> bool:
        """Whether the callback still waits to run."""
        return self.callback is not None

    def cancel(self) -> None:
        """Cancels the callback. Has no effect if the callback runs, has run or was cancelled."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            self.clock._bury_one()


class Clock:
    """The current time `now` and the scheduled callbacks."""

    def __init__(self, start_s: float = 0.0) -> None:
        if not -inf < start_s < inf:
            raise ValueError(f"a clock cannot start at {start_s} s: give a finite time")
        self.now = start_s
        self.num_run = 0
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._sequence = 0
        self._num_dead = 0

    @property
    def heap_size(self) -> int:
        """The number of timers in the heap, including cancelled timers that are not yet removed."""
        return len(self._heap)

    def __len__(self) -> int:
        """The number of waiting callbacks, without tombstones."""
        return len(self._heap) - self._num_dead

    def at(
        self, time_s: float, priority: int, callback: Callable[..., object], *args: Any
    ) -> Timer:
        """Schedules `callback(*args)` for `time_s`. Raises ValueError for a time before now."""
        if not self.now <= time_s < inf:
            raise ValueError(
                f"cannot schedule for {time_s} s at {self.now} s: give a later, finite time"
            )
        self._sequence = sequence = self._sequence + 1
        timer = Timer(self, callback, args)
        heappush(self._heap, (time_s, priority, sequence, timer))
        return timer

    def after(
        self, delay_s: float, priority: int, callback: Callable[..., object], *args: Any
    ) -> Timer:
        """Schedules `callback(*args)` for `delay_s` from now."""
        # The body of `at` is repeated, because a call of `at` would pack the arguments again.
        time_s = self.now + delay_s
        if not self.now <= time_s < inf:
            raise ValueError(
                f"cannot schedule for {time_s} s at {self.now} s: give a later, finite time"
            )
        self._sequence = sequence = self._sequence + 1
        timer = Timer(self, callback, args)
        heappush(self._heap, (time_s, priority, sequence, timer))
        return timer

    def run(self, until: float | None = None) -> None:
        """Runs callbacks in order up to and including `until`, and sets `now` to `until`.

        Without `until`, the clock runs until no callback waits. An exception of a callback
        propagates; the callback counts as run, and the clock can run on. Raises ValueError.
        """
        if until is not None and not self.now <= until < inf:
            raise ValueError(f"cannot run until {until} s at {self.now} s: give a later time")
        limit_s = inf if until is None else until
        heap = self._heap  # compaction is in place, so `heap` stays the current heap
        while heap and heap[0][0] <= limit_s:
            time_s, _, _, timer = heappop(heap)
            callback = timer.callback
            if callback is None:
                self._num_dead -= 1
                continue
            assert time_s >= self.now, f"time goes backwards: {self.now} s to {time_s} s"
            self.now = time_s
            self.num_run += 1
            timer.callback = None
            callback(*timer.args)
        if until is not None:
            self.now = until

    def step(self) -> bool:
        """Runs the next callback. Returns False if none is waiting."""
        while self._heap and self._heap[0][3].callback is None:
            heappop(self._heap)
            self._num_dead -= 1
        if not self._heap:
            return False
        time_s, _, _, timer = heappop(self._heap)
        callback = timer.callback
        assert callback is not None
        assert time_s >= self.now, f"time goes backwards: {self.now} s to {time_s} s"
        self.now = time_s
        self.num_run += 1
        timer.callback = None
        callback(*timer.args)
        return True

    def _bury_one(self) -> None:
        self._num_dead += 1
        heap = self._heap
        if self._num_dead * 2 > len(heap) and len(heap) >= MIN_HEAP_TO_COMPACT:
            heap[:] = [entry for entry in heap if entry[3].callback is not None]
            heapify(heap)  # keys are unique, so the order is independent of the layout
            self._num_dead = 0
