"""Decides which rejections become a wait, and for how long.

* A lost instance is restarted within seconds, while a request has minutes. So a request waits if it
  lacks nothing but an instance that was lost. Instances that left for good are not awaited.
* A request that was admitted before waits for room, and for a lost instance that alone is large
  enough.
* A new request waits for room, for the prompts before it, or for a batch that one more answer would
make late, if its first token can still come in time: within its TTFT SLO, or before its deadline if
nobody has stated an SLO. Without admission control, the wait for a batch ends at the latest after
`BATCH_SHARE` of the TTFT SLO, and the request is then placed all the same.
* A new program waits for the programs that began before it, until its deadline.
* A call of a program that has begun waits, because users of agents wait for the program's last
call.
* A choice of a call waits, whatever its TTFT, for the room of the call's other choices.
* A new request that is refused for the load waits for at most half of its TTFT SLO if its tenant is
  owed a place (`fair_share`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

import msgspec

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import (
    BATCH_FULL,
    BATCH_SHARE,
    NO_ROOM,
    PROGRAMS_WAIT,
    TIMED_REASONS,
    Rejection,
)
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting.fair_share import PATIENT_SHARE, FairShare
from moonpool.conductor.waiting.queue import WaitingRequests, WaitNeed
from moonpool.conductor.waiting.room_forecast import RoomForecast
from moonpool.types import Request, payer_of

UNSERVABLE_STATUS = 422
"""HTTP status of a rejection that an idle cluster would make, too."""
FAIR_SHARE = "fair_share"
"""The reason of a rejection in favour of other tenants' waiting requests."""
TIME_HELPS = frozenset({*TIMED_REASONS, FAIR_SHARE, PROGRAMS_WAIT})
"""Reasons of rejections that may disappear while a request waits, without making it late."""
POLICY = "admission_policy"
"""The reason of a rejection by the operator's own admission policy, which time alone does not
change."""
LOAD_REASONS = TIME_HELPS | {
    "ttft_slo",
    "decode_load",
    "decode_load_predicted",
    "goodput_prefill",
    "goodput_decode",
    POLICY,
}
MAX_PLACED_PER_TURN = 256
MAX_TRIED_PER_TURN = 8
"""Stop after this many failed placements in one turn: the remaining requests are unlikely to fit.
"""


class WaitRules:
    """Applies the rules; reads the bookings, and adds requests to the queue. Owns the queue, the
    shares of tenants, the forecast of room, and the times at which rejected requests should
    return."""

    def __init__(
        self, cluster_state: ClusterState, shares: FairShare, refuses_for_slo: bool
    ) -> None:
        """`refuses_for_slo`: whether a request that would miss its SLO is refused."""
        self._refuses_for_slo = refuses_for_slo
        self.shares, self.waiting = shares, WaitingRequests(shares)
        self.rooms = RoomForecast(cluster_state)
        self.retries = RetrySchedule()
        self._table: InstanceTable = cluster_state.instance_table
        # number of attempts under way, by call with several choices
        self._calls: Counter[str] = Counter()

    def note_attempt(self, request: Request, number: int) -> None:
        """Counts an attempt of a call that begins (1) or ends (-1)."""
        call = request.call
        if call:
            self._calls[call] += number
            if not self._calls[call]:
                del self._calls[call]

    def worth_trying(
        self, must_wait: Callable[[TrackedRequest], bool], now: float
    ) -> Iterator[TrackedRequest]:
        """Yields the waiting requests that may find a place now. A request that finds a place
        leaves the queue before the next request is asked for."""
        waiting = self.waiting
        if not len(waiting):
            return
        most_tokens = self._table.most_room_tokens()
        num_failures = 0
        least_tokens: float = inf  # least number of tokens for which there was no room
        for tracked in islice(waiting.due(now), MAX_PLACED_PER_TURN):
            needed = waiting.need(tracked).room_tokens
            tenant = payer_of(tracked.request.tenant)
            if must_wait(tracked) or needed >= least_tokens:
                continue
            if self.shares.must_yield(tenant, now):
                continue
            # The first request is always tried, because its needs may have changed.
            lacks_room = num_failures > 0 and needed > most_tokens
            if lacks_room and not self.shares.may_claim(tenant, needed, True, now):
                continue
            yield tracked
            if tracked.request.request_id in waiting:
                num_failures += 1
                least_tokens = min(least_tokens, waiting.need(tracked).room_tokens or inf)
            if num_failures >= MAX_TRIED_PER_TURN:
                break

    def with_wait(
        self, tracked: TrackedRequest, rejection: Rejection, answer_s: float, now: float
    ) -> Rejection:
        """Adds to the rejection how long the request would wait for room, or for the prompts before
        it. `answer_s`: mean duration of an answer."""
        if rejection.status == UNSERVABLE_STATUS or rejection.reason not in TIMED_REASONS:
            return rejection
        if rejection.reason == BATCH_FULL:
            # Each answer that ends makes room for one request.
            num_ahead = len(self.waiting) + 1
            wait_s = num_ahead * answer_s / max(self._table.total_decoding, 1)
            return msgspec.structs.replace(rejection, retry_after_s=wait_s)
        ahead = self.waiting.ahead(tracked, now)
        if rejection.reason == NO_ROOM:
            decodes = tracked.request.sampling.max_tokens - len(tracked.generated) > 1
            wait_s = self.rooms.wait_s(
                rejection.room_tokens, ahead.room_tokens, answer_s, now, decodes
            )
            text = f"{rejection.message}; there should be some in {max(wait_s, 0.1):.1f} s"
            return msgspec.structs.replace(rejection, message=text, retry_after_s=wait_s)
        wait_s = rejection.retry_after_s + ahead.prefill_s / max(self._table.num_prefills, 1)
        return msgspec.structs.replace(rejection, retry_after_s=wait_s)

    def may_wait(
        self, tracked: TrackedRequest, rejection: Rejection, answer_s: float, now: float
    ) -> bool:
        """Lets the request wait if time alone may remove the reason of its rejection, and returns
        whether it waits. `answer_s`: mean duration of an answer, as in `with_wait`."""
        request, waiting = tracked.request, self.waiting
        if not waiting.has_place(tracked):
            return False
        is_owed, latest_s = False, None
        # a refused program would only send the call again later
        is_whole = rejection.reason == PROGRAMS_WAIT
        if is_whole or waiting.awaits(rejection.reason) or self._waits_for_room(tracked, rejection):
            tracked.has_waited = True
        elif rejection.status not in (429, 503) or rejection.reason not in LOAD_REASONS:
            return False
        elif self._is_in_time(tracked, rejection, answer_s, now):
            is_owed = self.shares.may_wait(payer_of(request.tenant), now)
            if self._is_placed_late(rejection):
                latest_s = request.arrived_s + BATCH_SHARE * request.slo.ttft_s
            elif request.slo.ttft_stated:
                latest_s = _latest_s(request, rejection, answer_s)
        elif self._is_owed(tracked, now):
            is_owed, latest_s = True, request.arrived_s + request.slo.ttft_s / 2
        else:
            return False
        if request.request_id not in waiting:
            tracked.explanation.add(f"waits: {rejection.message}")
            need = WaitNeed(rejection.room_tokens, rejection.prefill_s)
            waiting.add(tracked, now, need, is_owed, latest_s)
        return True

    def may_claim(self, tracked: TrackedRequest, rejection: Rejection, now: float) -> bool:
        """Whether the request need not wait for the room that other tenants have, because its
        tenant is owed it."""
        request = tracked.request
        if rejection.status not in (429, 503) or rejection.reason not in LOAD_REASONS:
            return False
        if not self.shares.compete(now):
            return False
        patient_s = request.arrived_s + PATIENT_SHARE * request.slo.ttft_s
        tenant = payer_of(request.tenant)
        return self.shares.may_claim(tenant, rejection.room_tokens, now >= patient_s, now)

    def _waits_for_room(self, tracked: TrackedRequest, rejection: Rejection) -> bool:
        """Whether the request waits until its deadline for room that others hold. A request waits
        in this way if it was admitted before, if another choice of its call or another call of its
        program was, or if no request is refused for its SLO. If no instance that is up is large
        enough for it, a request that was admitted before waits for a lost one."""
        if rejection.status == UNSERVABLE_STATUS:
            return tracked.num_attempts > 0 and bool(self.waiting.lost)
        if rejection.reason not in LOAD_REASONS:
            return False
        tracked.call_has_begun |= self._calls[tracked.request.call] > 0
        program = tracked.program
        tracked.call_has_begun |= program is not None and program.goes_on
        lacks_room = rejection.reason == NO_ROOM
        is_admitted = tracked.num_attempts > 0 or not self._refuses_for_slo
        return tracked.call_has_begun or (lacks_room and is_admitted)

    def _is_in_time(
        self, tracked: TrackedRequest, rejection: Rejection, answer_s: float, now: float
    ) -> bool:
        """Whether time removes the reason of the rejection soon enough. A request that already
        waits was in time when it came, and its limit is kept."""
        request = tracked.request
        if rejection.reason == POLICY or (
            request.slo.ttft_stated and rejection.reason not in TIME_HELPS
        ):
            return False
        if self._is_placed_late(rejection):
            return True
        latest_s = _latest_s(request, rejection, answer_s)
        waits = request.request_id in self.waiting
        if waits and not request.slo.ttft_stated:
            return True
        return now < latest_s and (waits or now + rejection.retry_after_s <= latest_s)

    def _is_placed_late(self, rejection: Rejection) -> bool:
        """Whether the request will be placed after its wait, and not refused (`AdmissionCheck`)."""
        return rejection.reason == BATCH_FULL and not self._refuses_for_slo

    def _is_owed(self, tracked: TrackedRequest, now: float) -> bool:
        """Whether a new request waits because its tenant had less than its share."""
        request = tracked.request
        if tracked.num_attempts or now - request.arrived_s >= request.slo.ttft_s / 2:
            return False
        waits = request.request_id in self.waiting
        return waits or self.shares.may_wait(payer_of(request.tenant), now)


def _latest_s(request: Request, rejection: Rejection, answer_s: float) -> float:
    """Returns the latest time to place the request so that its first token is in time; without a
    stated SLO, so that its last token is in time."""
    if request.slo.ttft_stated:
        share = BATCH_SHARE if rejection.reason == BATCH_FULL else 1.0
        return request.arrived_s + share * request.slo.ttft_s - rejection.prefill_s
    return request.deadline_s - rejection.prefill_s - answer_s


WINDOW = 64
"""Number of completed requests from which the rate follows."""
STALE_S = 60.0
"""If no request has completed for this long, the rate is unknown."""
MAX_RETRY_AFTER_S = 120.0


class RetrySchedule(ClusterObserver):
    """Assigns a return time to each rejected request, one after another, as fast as the cluster
    completes requests. If all rejected requests were told the same time, they would return
    together, and most would be rejected again."""

    def __init__(self) -> None:
        self._completed_s: deque[float] = deque(maxlen=WINDOW)
        self._next_s = float("-inf")  # latest return time that a rejected request was given

    def ended(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        if is_answered:
            self.note_completed(now)

    def note_completed(self, now: float) -> None:
        """Notes a completed request."""
        self._completed_s.append(now)

    def retry_after_s(self, least_s: float, now: float) -> float:
        """Returns the seconds after which the next rejected request should return.

        The result is at least `least_s` and at least 1 s, one mean time between two completed
        requests after the previous rejected request, and at most MAX_RETRY_AFTER_S.
        """
        at_s = max(now + max(least_s, 1.0), min(self._next_s, now + MAX_RETRY_AFTER_S))
        self._next_s = at_s + self._gap_s(now)
        return min(max(at_s - now, 1.0), MAX_RETRY_AFTER_S)  # the difference has a rounding error

    def _gap_s(self, now: float) -> float:
        times_s = self._completed_s
        if len(times_s) < 2 or now - times_s[-1] > STALE_S:
            return 0.0
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1)
