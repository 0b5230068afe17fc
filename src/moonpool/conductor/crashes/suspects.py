"""Requests that may have ended an instance: they run alone, one after another.

    under way when an instance crashes --> suspected --its turn--> alone --goes on--> released
                                                                     \\--another crash--> culprit

An instance that is killed from outside makes no suspects: its requests are placed again at once. An
instance that crashes, or whose engine hangs, may do so because of a request, which would crash the
next instance too. The second crash shows which request caused both, because only one of the
suspects was under way, and no new request had joined it. When the culprit is found, the other
suspects are released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from moonpool.conductor.placement.choice import Rejection
from moonpool.conductor.state import AttemptPhase, InstanceState, TrackedRequest
from moonpool.types import InstanceId, RequestId

INSTANCES_ENDED = "instances_ended"
"""The reason of a rejection of the culprit."""
MAX_LOST = 64
PROOF_TOKENS, MOST_PROOF_TOKENS, ALONE_S = 16, 80, 30.0
"""A request is innocent after `PROOF_TOKENS` more tokens than it had in the attempt that crashed,
after `MOST_PROOF_TOKENS`, or after `ALONE_S` seconds."""


class Suspects:
    """The first suspect runs alone; the other suspects wait."""

    def __init__(self, requests: Mapping[RequestId, TrackedRequest]) -> None:
        """`requests`: the requests under way."""
        self._requests = requests
        # the suspects in order, with the length of the answer at which each counts as innocent;
        # callers only read it
        self.line: dict[RequestId, int] = {}
        self._lost: OrderedDict[InstanceId, dict[RequestId, int]] = OrderedDict()
        # instances whose crash was reported before they were lost
        self._crashed: OrderedDict[InstanceId, bool] = OrderedDict()
        self._since_s: float | None = None  # the time when the turn of the present suspect began

    def must_wait(self, tracked: TrackedRequest) -> bool:
        """Whether another request runs alone now."""
        request_id = tracked.request.request_id
        return request_id in self.line and request_id != next(iter(self.line))

    def run_alone_at(self, tracked: TrackedRequest, instances: Iterable[InstanceId | None]) -> bool:
        """Whether another request runs alone at one of the instances: nothing new may join it."""
        alone = self._requests.get(next(iter(self.line), RequestId("")))
        if alone is None or alone is tracked or alone.attempt is None:
            return False
        attempt = alone.attempt
        return not {attempt.prefill, attempt.decoder}.isdisjoint(instances)

    def note_lost(self, state: InstanceState) -> bool:
        """Call this method before the requests of the lost instance are placed again. Returns
        whether the instance is known to have crashed."""
        instance_id = state.info.instance_id
        self._lost[instance_id] = _candidates(state)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        return self._crashed.pop(instance_id, False)

    def accuse(self, instance_id: InstanceId) -> tuple[TrackedRequest | None, list[TrackedRequest]]:
        """Notes that the instance has crashed. Returns the culprit, if it is found, and the
        requests that wait for their turn from now on."""
        candidates = self._lost.pop(instance_id, None)
        if candidates is None:  # the loss of the instance has not been reported yet
            self._crashed[instance_id] = True
            if len(self._crashed) > MAX_LOST:
                self._crashed.popitem(last=False)
            return None, []
        alone = next(iter(self.line), None)
        if alone in candidates:
            self.line.clear()
            self._since_s = None
            return self._requests.get(alone), []
        for request_id, num_tokens in candidates.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                proof = min(num_tokens + PROOF_TOKENS, MOST_PROOF_TOKENS)
                self.line.setdefault(request_id, len(tracked.generated) + proof)
        return None, [self._requests[request_id] for request_id in list(self.line)[1:]]

    def note_placed(self, tracked: TrackedRequest, now: float) -> None:
        if self.line and tracked.request.request_id == next(iter(self.line)):
            self._since_s = now if self._since_s is None else self._since_s

    def end_long_turn(self, now: float) -> bool:
        """Ends the present turn if it has lasted long enough. Returns whether it did, so that the
        next request may be placed."""
        if self._since_s is None or now - self._since_s < ALONE_S:
            return False
        self.forget(next(iter(self.line)))
        return True

    def note_tokens(self, tracked: TrackedRequest) -> bool:
        """Ends the turn of a request that has proved innocent by its tokens. Returns whether it
        did, so that the next request may be placed."""
        proof = self.line.get(tracked.request.request_id)
        if proof is None or len(tracked.generated) < proof:
            return False
        self.forget(tracked.request.request_id)
        return True

    def forget(self, request_id: RequestId) -> None:
        """Drops a request that has ended or has proved innocent."""
        if self.line and request_id == next(iter(self.line)):
            self._since_s = None
        self.line.pop(request_id, None)


def culprit_rejection(instance_id: InstanceId) -> Rejection:
    """`instance_id`: the last instance that the request ended."""
    text = (
        "this request has ended two instances, so it is not tried again; tell the"
        f" server's operator: the last one was {instance_id}"
    )
    return Rejection(500, INSTANCES_ENDED, text, 0.0)


def _candidates(state: InstanceState) -> dict[RequestId, int]:
    """Returns the requests that were under way there, with the tokens that each had from its
    attempt. The request that had run for the shortest time is the likeliest cause, and comes
    first."""
    instance_id = state.info.instance_id
    running = [work for key, work in state.prefills.items() if key in state.started]
    queued = [work for key, work in state.prefills.items() if key not in state.started]
    decoding = [
        work
        for work in state.decodes.values()
        if work.attempt is not None
        and work.attempt.decoder == instance_id
        and work.attempt.phase is not AttemptPhase.PREFILL
    ]
    found = {w.request.request_id: _num_tokens(w) for w in (*running, *decoding, *queued)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _num_tokens(tracked: TrackedRequest) -> int:
    assert tracked.attempt is not None
    return len(tracked.generated) - tracked.attempt.begins_at
