"""Requests that wait for an instance, for room or for their share: they have no attempt meanwhile.

A lost instance is restarted within seconds, while a request has minutes. A request therefore waits
where nothing is missing but an instance that was lost, or room for an answer that was admitted
before. Only its deadline ends the wait. Instances that left for good are not awaited.

A new request that is refused for the load waits if its tenant is owed a place (`fair_share`), for
at most half of its SLO of TTFT.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moonpool.conductor.fair_share import FairShare
from moonpool.conductor.placement import Rejection
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.types import InstanceId, Request, RequestId, Role, payer_of

MAX_WAITING = 4096
MAX_WAITING_TOKENS = 1 << 24
"""Limits for requests that were not admitted before; the others always wait."""
MAX_LOST = 256
HOPELESS = 422
"""Status of a rejection that an idle cluster would make, too."""
RETRY_DELAYS_S = (0.0, 0.5, 1.5, 3.0, 5.0)
"""Delay of the next attempt after the first, second, ... fault in a row."""


LOAD_REASONS = frozenset(
    {"ttft_slo", "decode_load", "decode_load_predicted", "no_decode_capacity", "admission_policy"}
)


class _Wait(NamedTuple):
    tracked: TrackedRequest
    num_tokens: int
    not_before_s: float
    is_owed: bool


class WaitingRequests:
    """The requests that wait, oldest first, and the lost instances that are expected back."""

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._waits: dict[RequestId, _Wait] = {}
        self._num_tokens = 0
        self.lost: dict[InstanceId, Role] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waits

    def expect(self, roles: Mapping[InstanceId, Role]) -> None:
        """An earlier Conductor had these instances."""
        self.lost.update(roles)
        while len(self.lost) > MAX_LOST:
            del self.lost[next(iter(self.lost))]

    def note_lost(self, state: InstanceState) -> None:
        """An instance was lost. It is expected back unless it was leaving for good."""
        drain = state.drain
        if drain is not None and drain.becomes is None and not drain.returns:
            return
        self.expect({state.info.instance_id: state.info.role})

    def note_joined(self, instance_id: InstanceId) -> None:
        self.lost.pop(instance_id, None)

    def may_wait(self, tracked: TrackedRequest, rejection: Rejection) -> bool:
        """Whether time alone may remove the reason of this rejection."""
        if rejection.reason == "no_decode_capacity":
            return tracked.num_attempts > 0 and rejection.status != HOPELESS
        roles = self.lost.values()
        if rejection.reason == "no_instance":
            expected = bool(roles)
        elif rejection.reason == "no_prefill_instance":
            expected = any(role.prefills for role in roles)
        elif rejection.reason == "no_decode_instance":
            expected = any(role.decodes for role in roles)
        else:
            return False
        num_tokens = self._num_tokens + tracked.request.num_prompt_tokens
        has_room = len(self._waits) < MAX_WAITING and num_tokens <= MAX_WAITING_TOKENS
        return expected and (has_room or tracked.num_attempts > 0 or self._is_waiting(tracked))

    def is_owed(self, tracked: TrackedRequest, rejection: Rejection, now: float) -> bool:
        """Whether a new request waits because its tenant had less than its share."""
        if rejection.reason not in LOAD_REASONS or rejection.status not in (429, 503):
            return False
        if tracked.num_attempts:
            return False
        request = tracked.request
        if now - request.arrived_s > request.slo.ttft_s / 2:
            return False
        return self._is_waiting(tracked) or self._shares.may_wait(payer_of(request.tenant), now)

    def add(self, tracked: TrackedRequest, not_before_s: float, is_owed: bool = False) -> None:
        """A request that waits already keeps its place."""
        request = tracked.request
        if self._is_waiting(tracked):
            return
        if is_owed:
            self._shares.begin_wait(payer_of(request.tenant))
        else:
            tracked.has_waited = True
        num_tokens = request.num_prompt_tokens
        self._num_tokens += num_tokens
        self._waits[request.request_id] = _Wait(tracked, num_tokens, not_before_s, is_owed)

    def remove(self, request_id: RequestId) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._num_tokens -= wait.num_tokens
            if wait.is_owed:
                self._shares.end_wait(payer_of(wait.tracked.request.tenant))

    def due(self, now: float) -> Iterator[TrackedRequest]:
        """Yields the requests that may be placed now: those of the lowest priority value first;
        among them, next is the oldest one of the tenant that was given least, by what was placed
        since the last one. After half of its time a request counts as one of the best priority."""
        ready = [wait.tracked for wait in self._waits.values() if wait.not_before_s <= now]
        best = min((tracked.request.priority for tracked in ready), default=0)
        classes: dict[int, list[TrackedRequest]] = {}
        for tracked in ready:
            priority = best if _is_aged(tracked.request, now) else tracked.request.priority
            classes.setdefault(priority, []).append(tracked)
        for priority in sorted(classes):
            yield from self._by_tenant(classes[priority], now)

    def _by_tenant(self, ready: list[TrackedRequest], now: float) -> Iterator[TrackedRequest]:
        queues: dict[str, deque[TrackedRequest]] = {}
        for tracked in ready:
            queues.setdefault(payer_of(tracked.request.tenant), deque()).append(tracked)
        while queues:
            tenant = min(queues, key=lambda name: self._shares.level(name, now))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def _is_waiting(self, tracked: TrackedRequest) -> bool:
        return tracked.request.request_id in self._waits


def _is_aged(request: Request, now: float) -> bool:
    return now >= (request.arrived_s + request.deadline_s) / 2
