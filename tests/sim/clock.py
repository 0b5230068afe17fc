"""Virtual time: a total order of (time, sequence), and links that deliver in order."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Callback = Callable[[], None]


class Clock:
    """Runs callbacks in order of time. All randomness of a run comes from `rng`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def after(self, delay_s: float, callback: Callback) -> None:
        self.at(self.now + delay_s, callback)

    def at(self, time_s: float, callback: Callback) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, callback))

    def soon(self, slow_delay_s: float, callback: Callback) -> None:
        """Runs the callback after a random delay, mostly short and sometimes long."""
        self.after(self.delay_s(slow_delay_s), callback)

    def delay_s(self, slow_delay_s: float) -> float:
        slow = slow_delay_s and self.rng.random() < 0.1
        return self.rng.random() * (slow_delay_s if slow else 0.002)

    def run(self, max_events: int) -> None:
        """Runs until no event is left. Raises AssertionError after too many events."""
        while self._heap:
            time, _, callback = heapq.heappop(self._heap)
            assert time >= self.now
            self.now = time
            self.num_events += 1
            assert self.num_events <= max_events, "the run does not end"
            callback()


class Link:
    """One direction of a connection: in order, with random delays. A cut link delivers nothing."""

    def __init__(self, clock: Clock, slow_delay_s: float) -> None:
        self._clock = clock
        self._slow_delay_s = slow_delay_s
        self._last_s = 0.0
        self.cut = False

    def carry(self, callback: Callback) -> None:
        delay_s = self._clock.delay_s(self._slow_delay_s)
        self._last_s = max(self._last_s, self._clock.now + delay_s)
        self._clock.at(self._last_s, lambda: self.cut or callback())
