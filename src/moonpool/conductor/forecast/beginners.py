"""Which instances have started a prefill, and still learn from their first ones.

When a request arrives, the instances are asked whether they have computed anything new. A cluster
may have thousands, most of which have nothing new for seconds, so only the instances that were
woken, or whose time has come, are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from moonpool.conductor.instance_table import NEVER_S
from moonpool.conductor.state import InstanceState
from moonpool.types import InstanceId


@dataclass(slots=True, eq=False)
class _Beginner:
    number: int  # the place of the instance in the order of entry
    state: InstanceState
    until_s: float = NEVER_S  # the time of the instance's next information; `NEVER_S` means now
    gone: bool = False


class Beginners:
    """The instances in the order in which they entered."""

    def __init__(self) -> None:
        self._by_name: dict[InstanceId, _Beginner] = {}
        self._num_entered = 0
        # a heap of the instances whose `until_s` is NEVER_S
        self._due: list[tuple[int, _Beginner]] = []
        # a heap; entries of instances that were woken since do not count
        self._asleep: list[tuple[float, int, _Beginner]] = []

    def enter(self, state: InstanceState) -> None:
        """Adds and wakes an instance. A new incarnation takes the place of the old one."""
        name = state.info.instance_id
        one = self._by_name.get(name)
        if one is None:
            self._num_entered += 1
            one = self._by_name[name] = _Beginner(self._num_entered, state)
            heappush(self._due, (one.number, one))
        else:
            one.state = state
            self._wake(one)

    def leave(self, name: InstanceId) -> None:
        """Removes an instance, if it is here."""
        one = self._by_name.pop(name, None)
        if one is not None:
            one.gone = True

    def wake(self, state: InstanceState) -> None:
        """Notes that an instance, if it is here, may say something new now."""
        one = self._by_name.get(state.info.instance_id)
        if one is not None and one.state is state:
            self._wake(one)

    def sleep(self, state: InstanceState, until_s: float) -> None:
        """Notes that an instance, which `due` has just yielded, says nothing new before this
        time."""
        one = self._by_name[state.info.instance_id]
        one.until_s = until_s
        if until_s < inf:
            heappush(self._asleep, (until_s, one.number, one))

    def due(self, now: float) -> Iterator[InstanceState]:
        """Yields the instances that may say something new, in the order of their entry. An instance
        that is woken meanwhile follows if its place in this order has not passed. An instance that
        is neither sent to sleep nor removed is due again at the next call."""
        asleep = self._asleep
        while asleep and asleep[0][0] <= now:
            until_s, _, one = heappop(asleep)
            if one.until_s == until_s:
                self._wake(one)
        last, again = 0, []
        while self._due:
            number, one = heappop(self._due)
            if number > last and not one.gone:
                last = number
                yield one.state
            if one.until_s == NEVER_S and not one.gone:
                again.append((number, one))
        again.sort()  # a sorted list is a heap; numbers are unique
        self._due = again

    def _wake(self, one: _Beginner) -> None:
        if one.until_s != NEVER_S:
            one.until_s = NEVER_S
            heappush(self._due, (one.number, one))
