"""Plants bugs in a head that continues the answers of an earlier head."""

from __future__ import annotations

from typing import Any

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.request_lifecycle import RequestLifecycle
from moonpool.conductor.state import Attempt
from moonpool.conductor.waiting.queue import WaitingRequests
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method, nothing


@plant(
    "a new head begins the answers of the last one again",
    RequestLifecycle,
    "arrive",
    like="dynamo#732",
)
def _from_the_start(original: Method) -> Method:
    def defective(self: RequestLifecycle, request: Any, now: float, delivered: Any = None) -> None:
        original(self, request, now, None if delivered is None else ())

    return defective


@plant(
    "attempts of two heads have the same names",
    ClusterState,
    "book",
    like="sglang#22716",
)
def _same_names(original: Method) -> Method:
    def defective(self: ClusterState, *args: Any) -> Attempt:
        self._incarnation = ""
        attempt: Attempt = original(self, *args)
        return attempt

    return defective


@plant(
    "a new head does not wait for the last one's instances",
    WaitingRequests,
    "expect",
    like="dynamo#3493",
)
def _no_patience(original: Method) -> Method:
    return nothing(original)
