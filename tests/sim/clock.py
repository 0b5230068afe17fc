"""Gives a run virtual time, random delays, and links that deliver in order."""

from __future__ import annotations

import random
from collections.abc import Callable

from moonpool.sim.clock import Clock as VirtualClock
from moonpool.sim.clock import Priority

Callback = Callable[[], object]


class Clock:
    """The simulator's clock without priorities: events of the same time run in the order in
    which they were scheduled. All randomness of a run comes from `rng`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._clock = VirtualClock()

    @property
    def now(self) -> float:
        return self._clock.now

    def after(self, delay_s: float, callback: Callback) -> None:
        self._clock.after(delay_s, Priority.MESSAGE, callback)

    def at(self, time_s: float, callback: Callback) -> None:
        self._clock.at(time_s, Priority.MESSAGE, callback)

    def soon(self, slow_delay_s: float, callback: Callback) -> None:
        """Runs the callback after a random delay, mostly short and sometimes long."""
        self.after(self.delay_s(slow_delay_s), callback)

    def delay_s(self, slow_delay_s: float) -> float:
        slow = slow_delay_s and self.rng.random() < 0.1
        return self.rng.random() * (slow_delay_s if slow else 0.002)

    def run(self, max_events: int) -> None:
        """Runs until no event is left. Raises AssertionError after too many events."""
        while self._clock.step():
            assert self._clock.num_run <= max_events, "the run does not end"


class Link:
    """One direction of a connection. Messages arrive in order, with random delays; a cut link
    delivers nothing."""

    def __init__(self, clock: Clock, slow_delay_s: float) -> None:
        self._clock = clock
        self._slow_delay_s = slow_delay_s
        self._last_s = 0.0
        self.cut = False

    def carry(self, callback: Callback) -> None:
        delay_s = self._clock.delay_s(self._slow_delay_s)
        self._last_s = max(self._last_s, self._clock.now + delay_s)
        self._clock.at(self._last_s, lambda: self.cut or callback())
