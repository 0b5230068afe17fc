"""When unanswered requests end: at their deadlines, or when no room came in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from moonpool.conductor.placement.choice import Rejection
from moonpool.conductor.state import AttemptPhase, TrackedRequest
from moonpool.types import RequestId

TTFT_SLO_LATE = "ttft_slo_late"
"""The reason of a rejection because no room in a decode batch came in time: its prefill was for
nothing."""


class Deadlines:
    """Deadlines of the requests under way."""

    def __init__(self, requests: Mapping[RequestId, TrackedRequest]) -> None:
        self._requests = requests
        self._ends: list[tuple[float, RequestId]] = []  # a heap
        self._joining: list[tuple[float, RequestId]] = []  # a heap: when their TTFT SLO is missed

    def add(self, tracked: TrackedRequest) -> None:
        heapq.heappush(self._ends, (tracked.request.deadline_s, tracked.request.request_id))

    def add_joining(self, tracked: TrackedRequest) -> None:
        """Adds a request that is computed, and waits for room in a decode batch."""
        latest_s = tracked.request.arrived_s + tracked.request.slo.ttft_s
        heapq.heappush(self._joining, (latest_s, tracked.request.request_id))

    def trim(self) -> None:
        """Forgets ended requests once they outnumber the others."""
        if len(self._ends) > 2 * len(self._requests) + 64:
            self._ends = [end for end in self._ends if end[1] in self._requests]
            heapq.heapify(self._ends)

    def late(self, now: float, answer_s: float) -> Iterator[tuple[TrackedRequest, Rejection]]:
        """Yields the requests that are to be rejected now. `answer_s`: how long an
        answer takes, after which there may be room."""
        while self._joining and self._joining[0][0] <= now:
            tracked = self._requests.get(heapq.heappop(self._joining)[1])
            if tracked is None or tracked.attempt is None or tracked.generated:
                continue
            if tracked.attempt.phase is AttemptPhase.HANDOVER:
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
