"""Which answers give way where a tenant claims its share of the room (`fair_share`).

The first answer to give way is the youngest one of the tenant farthest above its share. The paused
answer continues later with the same tokens, so its client only sees a pause. No tenant falls below
the level of the claiming tenant, so that two tenants never take the room from each other in turn.
Answers past half of their time give way last, because they have been under way for long and must
end. Answers that could not continue (`ClusterState.is_bound`) do not give way. Books nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.conductor.cluster_state import VLLM, ClusterState
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.conductor.waiting.order import aged_s
from moonpool.types import payer_of


class Preemption:
    def __init__(self, cluster_state: ClusterState, shares: FairShare) -> None:
        self._table, self._instances = cluster_state.instance_table, cluster_state.instances
        self._is_bound, self._lacking = cluster_state.is_bound, cluster_state.lacking
        self._shares = shares

    def victims(self, tracked: TrackedRequest, num_tokens: int, now: float) -> list[TrackedRequest]:
        """Returns the answers whose end gives this request room for `num_tokens` on one instance:
        on the instance where their contexts have the fewest tokens, which must be computed again.
        Returns nothing if the request has no claim to the room of any answer."""
        best: list[TrackedRequest] = []
        least, lacking_rows = float("inf"), set(self._lacking(tracked.request))
        for state in self._instances.values():
            row, table = state.row, self._table
            if not table.decodes[row] or table.context_tokens.item(row) < num_tokens:
                continue
            if row in lacking_rows:
                continue
            lacking = num_tokens - table.room_tokens.item(row)
            chosen = self._choose(_holding(state), tracked, num_tokens, lacking, now)
            cost = sum(_context_tokens(victim) for victim in chosen)
            if chosen and cost < least:
                best, least = chosen, cost
        return best

    def overfull(self, now: float) -> list[TrackedRequest]:
        """Returns the answers that must give way on vLLM instances whose answers have outgrown the
        room: where tenants compete, vLLM itself would preempt the answer that came last. Moonpool's
        own instances preempt by tenant (`scheduler.batching.queue_order`)."""
        found: list[TrackedRequest] = []
        mean = self._shares.mean(now)
        if mean is None:
            return found
        for state in self._instances.values():
            lacking = -self._table.room_tokens.item(state.row)
            if lacking <= 0.0 or state.info.layout.inner != VLLM:
                continue
            holding = list(_holding(state))
            least = min(holding, key=lambda one: self._level(one, now))
            if self._level(least, now) < mean:
                found += self._choose(holding, least, 0, lacking, now)
        return found

    def _level(self, tracked: TrackedRequest, now: float) -> float:
        return self._shares.level(payer_of(tracked.request.tenant), now)

    def _choose(
        self,
        holding: Iterable[TrackedRequest],
        tracked: TrackedRequest,
        num_tokens: int,
        lacking: float,
        now: float,
    ) -> list[TrackedRequest]:
        """Returns answers of one instance that together hold the missing room, or none if all of
        them hold less. No answer gives way to a request of its own tenant."""
        shares, tenant = self._shares, payer_of(tracked.request.tenant)
        claimed = shares.level(tenant, now) + num_tokens / shares.weight(tenant)
        queues = _by_tenant((one for one in holding if not self._is_bound(one)), tracked, now)
        levels = {name: shares.level(name, now) for name in queues if name != tenant}
        chosen: list[TrackedRequest] = []
        while lacking > 0.0 and levels:
            name = max(levels, key=lambda one: levels[one])
            victim = queues[name].pop()
            attempt = victim.attempt
            assert attempt is not None
            left = levels[name] - attempt.booked_tokens / shares.weight(name)
            if left < claimed:
                del levels[name]
                continue
            chosen.append(victim)
            lacking -= attempt.booked_tokens
            levels[name] = left
            if not queues[name]:
                del levels[name]
        return chosen if lacking <= 0.0 else []


def _by_tenant(
    holding: Iterable[TrackedRequest], tracked: TrackedRequest, now: float
) -> dict[str, list[TrackedRequest]]:
    """Returns the answers that are no more urgent than the request, by tenant, in the order in
    which they keep their places."""
    found: dict[str, list[TrackedRequest]] = {}
    for other in holding:
        if other.request.priority >= tracked.request.priority:
            found.setdefault(payer_of(other.request.tenant), []).append(other)
    for queue in found.values():
        queue.sort(key=lambda one: (now < aged_s(one.request), one.request.arrived_s))
    return found


def _holding(state: InstanceState) -> Iterable[TrackedRequest]:
    """Yields the answers that hold KVCache on the instance."""
    for tracked in {**state.prefills, **state.decodes}.values():
        attempt = tracked.attempt
        assert attempt is not None
        if attempt.booked_tokens and attempt.decoder == state.info.instance_id:
            yield tracked


def _context_tokens(tracked: TrackedRequest) -> int:
    assert tracked.attempt is not None
    return tracked.attempt.num_tokens
