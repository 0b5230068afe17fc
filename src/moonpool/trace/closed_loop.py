"""Plays programs in a closed loop: a call starts when the calls before it have ended and its tools
have run.

Pure: the driver tells what ended, and gets what starts then and after how long. The simulator and
`replay` share this module, so that refused clients do the same in both (`retry_after_s`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moonpool.retry_delays import RetryDelays

MAX_TRIES = 12
"""A client gives its program up when a call was refused this often, as coding agents do."""
_DELAYS = RetryDelays((0.5, 1.0, 2.0, 4.0, 8.0))
LONGEST_WAIT_S = 60.0
"""A client waits no longer between two tries, whatever the server says."""


class LoopCall(Protocol):
    """The part of a request that the loop needs; see `TraceRow`."""

    @property
    def call(self) -> str: ...
    @property
    def after(self) -> tuple[str, ...]: ...
    @property
    def delay_s(self) -> float: ...
    @property
    def session(self) -> str: ...
    @property
    def parent(self) -> str: ...


T = TypeVar("T", bound=LoopCall)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    call: T
    num_missing: int


class ClosedLoop(Generic[T]):
    """The calls that were read and have not ended."""

    def __init__(self) -> None:
        # maps a call to the calls that wait for it
        self._open: dict[str, list[_Waiting[T]]] = {}
        self._failed: set[str] = set()
        self.num_dropped = 0  # number of dropped calls of abandoned programs
        self.num_waiting = 0

    def drops(self, call: T) -> bool:
        """Whether a call that was read now never starts: one that it waits for has failed before.
        A dropped call is not added."""
        if self._failed.isdisjoint(call.after):
            return False
        self._failed.add(call.call)
        return True

    def add(self, call: T) -> float | None:
        """Notes that a call was read. Returns None if it waits for other calls. Otherwise it starts
        at its own time, and at the earliest after the returned seconds: the calls before it ended
        before it was read, and its tools run from now on."""
        if not call.call:
            return 0.0
        missing = [name for name in call.after if name in self._open]
        self._open[call.call] = []
        if not missing:
            return call.delay_s if call.after else 0.0
        waiting = _Waiting(call, len(missing))
        for name in missing:
            self._open[name].append(waiting)
        self.num_waiting += 1
        return None

    def end(self, call: str) -> Iterator[T]:
        """Notes that a call was answered. Yields the calls that start after it, each after its
        `delay_s`."""
        for waiting in self._open.pop(call, ()):
            waiting.num_missing -= 1
            if not waiting.num_missing:
                self.num_waiting -= 1
                yield waiting.call

    def give_up(self, call: str) -> None:
        """Notes that a call has failed for good, and so have all that wait for it."""
        failed = deque([call])
        while failed:
            name = failed.popleft()
            self._failed.add(name)
            for waiting in self._open.pop(name, ()):
                if waiting.num_missing > 0:
                    waiting.num_missing = -1  # never
                    self.num_waiting -= 1
                    self.num_dropped += 1
                    failed.append(waiting.call.call)


def retry_after_s(status: int, num_tries: int, told_s: float | None) -> float | None:
    """Returns how long a client waits before it repeats a refused call, or None if it gives up.
    `told_s`: the seconds in the server's Retry-After. `num_tries`: number of tries so far."""
    if (status != 429 and status < 500) or num_tries >= MAX_TRIES:
        return None
    if told_s is not None:
        return min(max(told_s, 0.0), LONGEST_WAIT_S)
    return _DELAYS.after(num_tries)
