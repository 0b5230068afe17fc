"""Checks whether a placement may be booked: computes what admission needs to know, asks the policy,
and applies the exceptions."""

from __future__ import annotations

from math import inf

import msgspec

from moonpool.conductor.admission.context import AdmissionContext, SloBudget
from moonpool.conductor.admission.goodput import GoodputModel
from moonpool.conductor.admission.policies import UNLIMITED, AdmissionFunction, admit
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.cost_estimator import CostEstimator
from moonpool.conductor.placement.choice import (
    BATCH_FULL,
    BATCH_SHARE,
    LONG_QUEUE,
    Placement,
    Rejection,
)
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.conductor.state import TrackedRequest
from moonpool.config.tables import ConductorConfig


class AdmissionCheck:
    """Applies the admission policy and books no load."""

    def __init__(
        self,
        config: ConductorConfig,
        policy: AdmissionFunction | None,
        cluster_state: ClusterState,
        cost_estimator: CostEstimator,
        goodput: GoodputModel,
    ) -> None:
        """`policy`: a policy from outside the package, or None for the built-in policy that the
        config names."""
        self._config, self._policy = config, policy
        self._cluster_state = cluster_state
        self._cost_estimator, self._goodput = cost_estimator, goodput

    def check(
        self,
        tracked: TrackedRequest,
        footprint: RequestFootprint,
        placement: Placement,
        now: float,
    ) -> Placement | Rejection:
        """Returns the placement, with its wait for room in the decode batch, or why it may not be
        booked. Raises PolicyError if a policy from outside the package fails."""
        request, cluster_state = tracked.request, self._cluster_state
        # A request that goes on is not rejected for being slow.
        slo = UNLIMITED if goes_on(tracked) else request.slo.limits
        budget = SloBudget(slo, max(now - request.arrived_s, 0.0), request.slo)
        table, forecast = cluster_state.instance_table, cluster_state.forecast
        context = AdmissionContext(footprint, placement, budget, table, forecast, self._config, now)
        context, is_full = self._with_decode_wait(tracked, context)
        placement = context.placement
        tracked.num_decisions += 1
        rejection = admit(context, self._policy) or _long_queue(context)
        if rejection is None and is_full and self._holds_back(budget):
            text = f"one more answer would make those of {placement.prefill} late"
            rejection = Rejection(429, BATCH_FULL, text, 0.0)
        if rejection is None:
            if context.expected is not None:
                self._goodput.note_placed(context)
            return placement
        if not self._may_probe(context):
            return rejection
        tracked.explanation.add(
            f"admitted to check the cost estimate, although {rejection.message}"
        )
        return placement

    def _with_decode_wait(
        self, tracked: TrackedRequest, context: AdmissionContext
    ) -> tuple[AdmissionContext, bool]:
        """Returns the context with the expectation of `goodput` and with the placement's wait for
        room in the decode batch; and whether the request should wait before it is placed. A request
        that continues after a fault never waits."""
        by_goodput = self._config.admission == "goodput"
        if context.budget.slo is UNLIMITED or not (by_goodput or self._config.decode_wait):
            return context, False
        load = self._goodput.decode.load(context)
        expected = None
        if by_goodput:
            expected = self._goodput.expect(context, load, tracked.keys, not tracked.num_decisions)
        tracked.predicted_step_s = load.with_s if load.lasts else 0.0
        placement = msgspec.structs.replace(
            context.placement,
            ttft_s=context.placement.ttft_s + load.wait_s,
            decode_wait_s=load.wait_s,
            max_step_s=load.max_step_s,
        )
        context = msgspec.structs.replace(context, placement=placement, expected=expected)
        return context, load.is_full

    def _holds_back(self, budget: SloBudget) -> bool:
        """Whether the request should go on waiting for a batch with room. Without admission control
        the request is never refused, and waits for at most `BATCH_SHARE` of its TTFT SLO."""
        return (
            self._config.admission != "none"
            or budget.waited_s < BATCH_SHARE * budget.yardstick.ttft_s
        )

    def _may_probe(self, context: AdmissionContext) -> bool:
        """Like `CostEstimator.may_probe`, but False where the operator has chosen a policy of their
        own."""
        if self._policy is not None:
            return False
        placement, limit = context.placement, self._config.load_limit
        row = self._cluster_state.instances[placement.prefill].row
        return self._cost_estimator.may_probe(placement, row, context.budget, limit, context.now)


def goes_on(tracked: TrackedRequest) -> bool:
    """Whether the request's answer has begun, or the request had to wait or to begin again by no
    fault of its own (`TrackedRequest.has_waited`)."""
    return bool(tracked.generated) or tracked.has_waited


def _long_queue(context: AdmissionContext) -> Rejection | None:
    """A request without a stated TTFT SLO is not refused for its TTFT. But the queue of an instance
    grows only as long as an assumed SLO allows, because other requests have stated theirs. Further
    requests wait at the Conductor, which keeps the order of priorities and tenants."""
    budget, placement = context.budget, context.placement
    if budget.slo is UNLIMITED or budget.slo.ttft_s < inf:
        return None
    queue_s, limit_s = placement.queue_s + placement.decode_wait_s, budget.yardstick.ttft_s
    if queue_s <= limit_s:
        return None
    text = f"the prompts before it take {queue_s:.1f} s, more than {limit_s:g} s"
    return Rejection(503, LONG_QUEUE, text, queue_s - limit_s)
