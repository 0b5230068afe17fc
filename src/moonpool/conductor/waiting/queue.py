"""Requests that wait for an instance, for room or for their share. A waiting request has no
attempt.

`rules` decides which requests wait. The queue is bounded, and each tenant has a part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from moonpool.conductor.placement.choice import Rejection
from moonpool.conductor.state import AttemptPhase, InstanceState, TrackedRequest
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.conductor.waiting.order import WaitingOrder
from moonpool.retry_delays import RetryDelays
from moonpool.types import InstanceId, RequestId, Role, payer_of

MAX_WAITING = 4096
MAX_WAITING_TOKENS = 1 << 24
"""Limits for requests that were not admitted before; requests that were admitted always wait."""
MAX_LOST = 256
RETRIES = RetryDelays((0.0, 0.5, 1.5, 3.0, 5.0))
"""Seconds between two attempts, after the first, second, ... of consecutive faults."""


class WaitNeed(NamedTuple):
    """The prefill time and KVCache that a waiting request will take."""

    room_tokens: int  # KVCache tokens that the request needs where it decodes
    prefill_s: float


NOTHING = WaitNeed(0, 0.0)


class _Wait(NamedTuple):
    tracked: TrackedRequest
    num_tokens: int
    need: WaitNeed
    is_owed: bool
    number: int  # number of the request in the order of placement


@dataclass(slots=True)
class _Part:
    """The waiting requests of one tenant."""

    num_waiting: int = 0
    num_tokens: int = 0
    room_tokens: int = 0
    prefill_s: float = 0.0

    def add(self, wait: _Wait, sign: int = 1) -> None:
        self.num_waiting += sign
        self.num_tokens += sign * wait.num_tokens
        self.room_tokens += sign * wait.need.room_tokens
        self.prefill_s += sign * wait.need.prefill_s


class WaitingRequests:
    """The requests that wait, oldest first, and the lost instances that are expected back."""

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._order = WaitingOrder(shares)
        self._waits: dict[RequestId, _Wait] = {}
        self._num_tokens = 0
        self._parts: dict[str, _Part] = {}  # by tenant
        # a heap of (time until which a request may wait, the request)
        self._limits: list[tuple[float, RequestId]] = []
        self.lost: dict[InstanceId, Role] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[_Wait]:
        """The waiting requests in the order of their arrival."""
        return iter(self._waits.values())

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waits

    @property
    def line(self) -> int:
        """Returns the place in the order that a request gets if it comes now."""
        return self._order.num_entered

    def expect(self, roles: Mapping[InstanceId, Role]) -> None:
        """Adds instances that should join soon: those that were lost, that will return, or that an
        earlier Conductor had."""
        self.lost.update(roles)
        while len(self.lost) > MAX_LOST:
            del self.lost[next(iter(self.lost))]

    def note_lost(self, state: InstanceState) -> None:
        """Notes that an instance was lost. The instance is expected back unless it was leaving for
        good."""
        drain = state.drain
        if drain is not None and drain.becomes is None and not drain.returns:
            return
        self.expect({state.info.instance_id: state.info.role})

    def note_joined(self, instance_id: InstanceId) -> None:
        """Notes that an instance has joined, so that no request waits for it any longer."""
        self.lost.pop(instance_id, None)

    def need(self, tracked: TrackedRequest) -> WaitNeed:
        """Returns the prefill time and KVCache that a waiting request will take."""
        return self._waits[tracked.request.request_id].need

    # Who may wait

    def awaits(self, reason: str) -> bool:
        """Whether an instance is expected back whose absence caused a rejection."""
        roles = self.lost.values()
        if reason == "no_instance":
            return bool(roles)
        if reason == "no_prefill_instance":
            return any(role.prefills for role in roles)
        return reason == "no_decode_instance" and any(role.decodes for role in roles)

    def has_place(self, tracked: TrackedRequest) -> bool:
        """Whether the queue takes this request. A request that was admitted before always has a
        place, and a waiting request keeps its place. The places for new requests are divided
        equally among this tenant, the other tenants that wait, and one tenant that may still
        come."""
        request = tracked.request
        if tracked.num_attempts or self._is_waiting(tracked):
            return True
        tenant = payer_of(request.tenant)
        part = self._parts.get(tenant, _Part())
        num_parts = len(self._parts.keys() | {tenant}) + 1
        num_tokens = request.num_prompt_tokens
        return (
            len(self._waits) < MAX_WAITING
            and self._num_tokens + num_tokens <= MAX_WAITING_TOKENS
            and part.num_waiting < -(-MAX_WAITING // num_parts)
            and part.num_tokens + num_tokens <= -(-MAX_WAITING_TOKENS // num_parts)
        )

    def ahead(self, tracked: TrackedRequest, now: float) -> WaitNeed:
        """Returns what all waiting requests that would be placed before this one need together, by
        the levels of the tenants. Priorities do not count."""
        tenant = payer_of(tracked.request.tenant)
        level = self._shares.level(tenant, now)
        room_tokens, prefill_s = 0, 0.0
        for name, part in self._parts.items():
            if name == tenant or self._shares.level(name, now) <= level:
                room_tokens += part.room_tokens
                prefill_s += part.prefill_s
        return WaitNeed(room_tokens, prefill_s)

    # The queue

    def add(
        self,
        tracked: TrackedRequest,
        not_before_s: float,
        need: WaitNeed = NOTHING,
        is_owed: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """Adds a request; a request that waits already keeps its place. `limit_s`: the time at
        which `over` checks the request again, or None if its deadline is the only limit."""
        request = tracked.request
        if self._is_waiting(tracked):
            return
        tenant = payer_of(request.tenant)
        if is_owed:
            self._shares.begin_wait(tenant)
        number = self._order.enter(tracked, not_before_s)
        wait = _Wait(tracked, request.num_prompt_tokens, need, is_owed, number)
        self._num_tokens += wait.num_tokens
        self._parts.setdefault(tenant, _Part()).add(wait)
        self._waits[request.request_id] = wait
        if limit_s is not None:
            heapq.heappush(self._limits, (limit_s, request.request_id))
            if len(self._limits) > 2 * len(self._waits) + 64:
                self._limits = [limit for limit in self._limits if limit[1] in self._waits]
                heapq.heapify(self._limits)

    def remove(self, request_id: RequestId) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return
        tenant = payer_of(wait.tracked.request.tenant)
        self._order.leave(wait.number)
        self._num_tokens -= wait.num_tokens
        self._parts[tenant].add(wait, -1)
        if not self._parts[tenant].num_waiting:
            del self._parts[tenant]  # also removes the rounding errors of the sums
        if wait.is_owed:
            self._shares.end_wait(tenant)

    def over(self, now: float) -> Iterator[TrackedRequest]:
        """Yields the requests that have waited for as long as they may."""
        while self._limits and self._limits[0][0] <= now:
            wait = self._waits.get(heapq.heappop(self._limits)[1])
            if wait is not None:
                yield wait.tracked

    def due(self, now: float) -> Iterator[TrackedRequest]:
        """Yields the requests that may be placed now, in their order; requests may leave during the
        iteration."""
        return self._order.due(now)

    def is_due(self, wait: _Wait, now: float) -> bool:
        """Whether the delay of a waiting request is over."""
        return self._order.is_due(wait.number, now)

    def _is_waiting(self, tracked: TrackedRequest) -> bool:
        return tracked.request.request_id in self._waits


TTFT_SLO_LATE = "ttft_slo_late"
"""The reason of a rejection because no room in a decode batch came in time, which makes the prefill
useless."""


class Deadlines:
    """Finds the unanswered requests that must end: at their deadlines, or when no room came in
    time."""

    def __init__(self, requests: Mapping[RequestId, TrackedRequest]) -> None:
        self._requests = requests
        self._ends: list[tuple[float, RequestId]] = []  # a heap
        # a heap of (time when the TTFT SLO of a request is missed, the request)
        self._joining: list[tuple[float, RequestId]] = []

    def add(self, tracked: TrackedRequest) -> None:
        heapq.heappush(self._ends, (tracked.request.deadline_s, tracked.request.request_id))

    def move(self, request_id: RequestId, deadline_s: float) -> None:
        """Gives a request another deadline."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.request = replace(tracked.request, deadline_s=deadline_s)
            self.add(tracked)

    def add_joining(self, tracked: TrackedRequest) -> None:
        """Adds a request whose prompt is computed and which waits for room in a decode batch."""
        latest_s = tracked.request.arrived_s + tracked.request.slo.ttft_s
        heapq.heappush(self._joining, (latest_s, tracked.request.request_id))

    def trim(self) -> None:
        """Forgets ended requests once they outnumber the unfinished ones."""
        for ends in (self._ends, self._joining):
            if len(ends) > 2 * len(self._requests) + 64:
                ends[:] = [end for end in ends if end[1] in self._requests]
                heapq.heapify(ends)

    def late(self, now: float, answer_s: float) -> Iterator[tuple[TrackedRequest, Rejection]]:
        """Yields the requests that must be rejected now. `answer_s`: mean duration of an answer,
        after which there may be room."""
        while self._joining and self._joining[0][0] <= now:
            tracked = self._requests.get(heapq.heappop(self._joining)[1])
            if tracked is None or tracked.attempt is None or tracked.generated:
                continue
            if tracked.attempt.waits and tracked.attempt.phase is AttemptPhase.HANDOVER:
                slo_s = tracked.request.slo.ttft_s
                text = f"its decode instance had no room within the TTFT SLO of {slo_s:g} s"
                yield tracked, Rejection(429, TTFT_SLO_LATE, text, answer_s)
        while self._ends and self._ends[0][0] <= now:
            tracked = self._requests.get(heapq.heappop(self._ends)[1])
            if tracked is None or tracked.request.deadline_s > now:
                continue
            stage = tracked.attempt.phase.value if tracked.attempt else "placement"
            text = f"the request's deadline passed during {stage}"
            yield tracked, Rejection(504, "deadline", text, 1.0)
