"""The order in which requests that wait at the Conductor are placed.

The lowest priority value comes first; within a priority, the tenant that has received least
(`fair_share`); within a tenant, the request that has waited longest. A call of a program counts as
waiting since the program arrived. After half of its time a request counts as one of the best
waiting priority.

A request enters and leaves in logarithmic time, and only the requests considered are sorted,
because at overload answers end often while thousands of requests wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence

from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.types import Request, payer_of

# (arrival number of the program or of the request itself, number of the request)
_Place = tuple[int, int]
_Queue = list[tuple[_Place, TrackedRequest]]
_Queues = dict[str, _Queue]  # by tenant
LOOK_AHEAD = 256
"""Number of requests of a tenant and class that one look considers."""


class WaitingOrder:
    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self.num_entered = 0
        self._entered: dict[int, TrackedRequest] = {}
        self._classes: dict[int, _Queues] = {}  # by priority
        self._aged: _Queues = {}
        # number of aged requests by the priority that they had before
        self._aged_priorities: Counter[int] = Counter()
        # a heap of (time when a request counts as aged, its number)
        self._aging: list[tuple[float, int]] = []
        # number of the request -> earliest time of its next attempt
        self._delayed: dict[int, float] = {}

    def enter(self, tracked: TrackedRequest, not_before_s: float) -> int:
        """Adds a request; returns the number by which it leaves."""
        number = self.num_entered
        self.num_entered += 1
        self._entered[number] = tracked
        self._delayed[number] = not_before_s
        return number

    def is_due(self, number: int, now: float) -> bool:
        """Whether the delay of a request is over."""
        return self._delayed.get(number, now) <= now

    def leave(self, number: int) -> None:
        tracked = self._entered.pop(number)
        if self._delayed.pop(number, None) is not None:
            return
        priority, tenant = tracked.request.priority, payer_of(tracked.request.tenant)
        place = _place(tracked, number)
        if _take(self._aged, tenant, place):
            self._aged_priorities[priority] -= 1
            if not self._aged_priorities[priority]:
                del self._aged_priorities[priority]
        else:
            assert _take(self._classes[priority], tenant, place)
            if not self._classes[priority]:
                del self._classes[priority]

    def due(self, now: float) -> Iterator[TrackedRequest]:
        """Yields the requests that may be placed now. The order takes into account what was placed
        since the previous request was yielded. Requests may leave and enter during the iteration;
        it does not yield those that enter."""
        self._look(now)
        if not self._aged:
            for priority in sorted(self._classes):
                yield from self._by_tenant([self._classes[priority]], now)
            return
        best = min((*self._classes, *self._aged_priorities))
        yield from self._by_tenant([self._aged, self._classes.get(best, {})], now)
        for priority in sorted(self._classes.keys() - {best}):
            yield from self._by_tenant([self._classes[priority]], now)

    def _look(self, now: float) -> None:
        """Admits requests whose delay is over to the queues, and marks the aged ones."""
        for number in [n for n, not_before_s in self._delayed.items() if not_before_s <= now]:
            del self._delayed[number]
            tracked = self._entered[number]
            self._insert(self._classes.setdefault(tracked.request.priority, {}), number, tracked)
            heapq.heappush(self._aging, (aged_s(tracked.request), number))
        while self._aging and self._aging[0][0] <= now:
            number = heapq.heappop(self._aging)[1]
            aged = self._entered.get(number)
            if aged is not None:
                self.leave(number)
                self._entered[number] = aged
                self._insert(self._aged, number, aged)
                self._aged_priorities[aged.request.priority] += 1
        if len(self._aging) > 2 * len(self._entered) + 64:
            self._aging = [one for one in self._aging if one[1] in self._entered]
            heapq.heapify(self._aging)

    def _insert(self, queues: _Queues, number: int, tracked: TrackedRequest) -> None:
        entry = (_place(tracked, number), tracked)
        insort(queues.setdefault(payer_of(tracked.request.tenant), []), entry)

    def _by_tenant(self, parts: Sequence[_Queues], now: float) -> Iterator[TrackedRequest]:
        queues: dict[str, Iterator[tuple[_Place, TrackedRequest]]] = {}
        for tenant in dict.fromkeys(name for part in parts for name in part):
            first = [part[tenant][:LOOK_AHEAD] for part in parts if tenant in part]
            queues[tenant] = heapq.merge(*first) if len(first) > 1 else iter(first[0])
        while queues:
            tenant = min(queues, key=lambda name: self._shares.level(name, now))
            following = next(queues[tenant], None)
            if following is None:
                del queues[tenant]
            else:
                yield following[1]


def _place(tracked: TrackedRequest, number: int) -> _Place:
    return (number if tracked.program is None else tracked.program.line), number


def _take(queues: _Queues, tenant: str, place: _Place) -> bool:
    """Removes the request with this place from the queues, if it is queued."""
    queue = queues.get(tenant)
    if queue is None:
        return False
    at = bisect_left(queue, place, key=lambda one: one[0])
    if at == len(queue) or queue[at][0] != place:
        return False
    del queue[at]
    if not queue:
        del queues[tenant]
    return True


def aged_s(request: Request) -> float:
    """Returns the time when half of the request's time to its deadline is over."""
    return (request.arrived_s + request.deadline_s) / 2
