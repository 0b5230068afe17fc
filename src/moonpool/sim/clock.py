"""Virtual time: the order in which everything in a simulation happens.

Owns `now` and the callbacks still to be run, in the total order (time, priority, sequence). It
never reads a real clock, sleeps, or knows what a callback does.

Time is float seconds. The order is still total and the same on every machine: each time is one
finite IEEE double, so any two compare as less, equal or greater, with no tolerance; equal times
are told apart by priority, equal priorities by sequence, which no two callbacks share. NaN, which
would compare as none of the three, and infinity are refused.

Life of a callback: waiting -> run | cancelled. A cancelled one stays in the heap as a tombstone
until its time comes or tombstones are more than half of the heap, whichever is first.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

MIN_HEAP_TO_COMPACT = 64


class Priority(IntEnum):
    """Who goes first at the same instant: what frees or breaks things before what decides."""

    FAULT = 0  # what is dead at t can do nothing more at t
    TRANSFER_END = 1  # bytes that are there at t count for a step that starts at t
    STEP_END = 2  # frees blocks and batch places before anybody asks for them
    MESSAGE = 3  # reports and commands: the Conductor hears what has ended ...
    ARRIVAL = 4  # ... before it places a request that comes at the same moment
    TICK = 5  # samples and periodic decisions see all that happened at t
    RERATE = 6  # links are shared anew once per instant, when all its changes are known


class Timer:
    """One callback to be run; kept by who may want to cancel it."""

    __slots__ = ("args", "callback", "clock")

    def __init__(
        self, clock: Clock, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.clock = clock
        self.callback: Callable[..., object] | None = callback
        self.args = args

    @property
    def waiting(self) -> bool:
        return self.callback is not None

    def cancel(self) -> None:
        """Without effect if it has run (or is running) or was cancelled before."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            self.clock._bury_one()


class Clock:
    def __init__(self, start_s: float = 0.0) -> None:
        if not -inf < start_s < inf:
            raise ValueError(f"a clock cannot start at {start_s} s: give a finite time")
        self.now = start_s
        self.num_run = 0
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._sequence = 0
        self._num_dead = 0

    def __len__(self) -> int:
        """Callbacks waiting, tombstones not counted."""
        return len(self._heap) - self._num_dead

    def at(
        self, time_s: float, priority: int, callback: Callable[..., object], *args: Any
    ) -> Timer:
        """Run `callback(*args)` at `time_s`, which may be now but not before."""
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
        return self.at(self.now + delay_s, priority, callback, *args)

    def run(self, until: float | None = None) -> None:
        """Run what is due, in order, up to and including `until`; then it is `until`.

        Without `until`: until nothing is waiting. An exception of a callback comes through; the
        callback counts as run, and the clock can go on.
        """
        if until is not None and not self.now <= until < inf:
            raise ValueError(f"cannot run until {until} s at {self.now} s: give a later time")
        limit_s = inf if until is None else until
        heap = self._heap  # compaction happens in place, so this stays the heap
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
        """Run the next callback; False if none is waiting."""
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
            heapify(heap)  # keys are unique: the order of running does not depend on the layout
            self._num_dead = 0
