"""Plants bugs in the Conductor: requests that hang, sums that drift, a wrong index."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.conductor.actions import Refuse
from moonpool.conductor.attempt_planner import AttemptPlanner
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.draining import Draining
from moonpool.conductor.request_lifecycle import RequestLifecycle
from moonpool.conductor.roles.role_switching import RoleSwitching
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.conductor.waiting.queue import WaitingRequests
from moonpool.conductor.waiting.rules import RetrySchedule
from moonpool.kvcache.eviction.replicas import ReplicaOwners
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.protocol.messages import AttemptFailed, BlocksSnapshot, ReserveDecode
from moonpool.scheduler.instance import Instance
from moonpool.types import FinishReason, RequestId, Token
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method, nothing


@plant("events ignored", PrefixIndex, "apply", like="mooncake#2246")
def _deaf(original: Method) -> Method:
    return lambda *args: True


@plant("retries start over", RequestLifecycle, "deliver", like="dynamo#732")
def _forget_delivered(original: Method) -> Method:
    def defective(self: RequestLifecycle, tracked: TrackedRequest, *rest: Any) -> None:
        original(self, tracked, *rest)
        tracked.generated.clear()

    return defective


@plant("reservations never end", ClusterState, "end_prefill", like="router#2881")
def _book_forever(original: Method) -> Method:
    return nothing(original)


@plant(
    "a failed prefill is not heard of",
    RequestLifecycle,
    "on_report",
    like="sglang#9726 llm-d#2433",
)
def _failure_lost(original: Method) -> Method:
    def defective(self: RequestLifecycle, report: Any, *rest: Any) -> None:
        if not isinstance(report, AttemptFailed):
            original(self, report, *rest)

    return defective


@plant(
    "a refusal is not sent",
    RequestLifecycle,
    "_reject",
    like="sglang#33858",
)
def _silent_refusal(original: Method) -> Method:
    def defective(self: RequestLifecycle, *args: Any) -> None:
        original(self, *args)
        refusals = [a for a in self._actions if isinstance(a, Refuse)]
        self._actions.remove(refusals[-1])

    return defective


@plant(
    "the decode instance is chosen and never told",
    AttemptPlanner,
    "commands",
    like="dynamo#13088",
)
def _no_reserve(original: Method) -> Method:
    def defective(self: AttemptPlanner, *args: Any) -> Any:
        found = original(self, *args)
        return [pair for pair in found if not isinstance(pair[1], ReserveDecode)]

    return defective


@plant(
    "a request is forgotten after some time, whatever its deadline",
    RequestLifecycle,
    "expire",
    like="dynamo#13310",
)
def _impatient(original: Method) -> Method:
    def defective(self: RequestLifecycle, now: float) -> None:
        ends = self._deadlines._ends
        ends[:] = [
            (min(at_s, self.requests[name].request.arrived_s + 1.0), name)
            for at_s, name in ends
            if name in self.requests
        ]
        for tracked in self.requests.values():
            request = tracked.request
            if request.arrived_s + 1.0 < now:
                tracked.request = msgspec.structs.replace(request, deadline_s=now)
        ends.sort()
        original(self, now)

    return defective


@plant(
    "a refusal does not say when to come back",
    RetrySchedule,
    "retry_after_s",
    like="dynamo#12966",
)
def _bare_refusal(original: Method) -> Method:
    return lambda self, least_s, now: 0.0


@plant(
    "the index keeps the blocks of a lost instance",
    PrefixIndex,
    "remove_instance",
    like="router#2853 aibrix#2287 mooncake#1078",
)
def _ghosts(original: Method) -> Method:
    def defective(self: PrefixIndex, instance_id: Any) -> None:
        announced = self._instances.pop(instance_id, None)
        if announced is not None:
            self._free_rows.append(announced.row)

    return defective


@plant(
    "removed blocks stay in the index",
    PrefixIndex,
    "apply",
    like="dynamo#4429 production-stack#687",
)
def _never_removes(original: Method) -> Method:
    def defective(self: PrefixIndex, *args: Any) -> bool:
        return bool(original(self, *args[:4], (), *args[5:]))

    return defective


@plant(
    "one instance that drops a block drops it for all",
    PrefixIndex,
    "_drop",
    like="mooncake#2039",
)
def _drop_for_all(original: Method) -> Method:
    def defective(self: PrefixIndex, announced: Any, keys: Any) -> None:
        keys = list(keys)
        original(self, announced, keys)
        for key in keys:
            self._holders.pop(key, None)

    return defective


@plant(
    "the gap in an instance's events is never closed",
    PrefixIndex,
    "load_snapshot",
    like="dynamo#7072",
)
def _gap_stays(original: Method) -> Method:
    def defective(self: PrefixIndex, instance_id: Any, *args: Any) -> bool:
        loaded = bool(original(self, instance_id, *args))
        if loaded:
            self._instances[instance_id].in_sync = False
        return loaded

    return defective


@plant(
    "a new head hears of no blocks",
    Instance,
    "_on_resync",
    like="mooncake#1150 mooncake#1871",
)
def _cold(original: Method) -> Method:
    def defective(self: Instance, command: Any) -> None:
        snapshot = self._kv_cache.take_snapshot()
        empty = BlocksSnapshot(next_sequence=snapshot.next_sequence, keys=())
        self._actions_out.report(empty)

    return defective


@plant(
    "waiting requests are not placed when room comes",
    RequestLifecycle,
    "place_waiting",
    like="sglang#33858 dynamo#3493",
)
def _wait_forever(original: Method) -> Method:
    return nothing(original)


@plant("a lost instance ends its requests", RequestLifecycle, "_retry", like="dynamo#732")
def _give_up(original: Method) -> Method:
    def defective(self: RequestLifecycle, *args: Any, **more: Any) -> None:
        attempts, self._max_attempts = self._max_attempts, 1
        original(self, *args, **more)
        self._max_attempts = attempts

    return defective


@plant(
    "an instance leaves while others read its blocks",
    Draining,
    "_advance",
    like="llm-d#1138",
)
def _leave_early(original: Method) -> Method:
    def defective(self: Draining, departure: Any, now: float) -> Any:
        drain = departure.state.drain
        if drain is None or drain.commanded:
            return []
        return self._leave(departure, drain)

    return defective


@plant("a drain's fetch is booked for ever", Draining, "_end_fetch", like="sglang#9927")
def _booked_for_ever(original: Method) -> Method:
    def defective(self: Draining, number: int) -> Any:
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            fetch.departure.num_fetches -= 1
        return fetch

    return defective


@plant("a role switch never ends", RoleSwitching, "on_role_changed", like="dynamo#13238")
def _no_switch(original: Method) -> Method:
    return lambda self, state, role, now: []


@plant("every copy of a block is marked as spare", ReplicaOwners, "of")
def _all_spare(original: Method) -> Method:
    return lambda self, key, holders: 0


@plant("the lost instances' requests are not placed again", RequestLifecycle, "on_instance_lost")
def _lost_with_it(original: Method) -> Method:
    def defective(self: RequestLifecycle, state: InstanceState, *rest: Any) -> None:
        state.decodes.clear()
        original(self, state, *rest)

    return defective


@plant("the last token is delivered twice", RequestLifecycle, "deliver")
def _twice(original: Method) -> Method:
    def defective(
        self: RequestLifecycle,
        tracked: TrackedRequest,
        tokens: tuple[Token, ...],
        finish: FinishReason | None,
        *rest: Any,
    ) -> None:
        again = tokens[-1:] if tracked.num_attempts > 1 else ()
        original(self, tracked, (*tokens, *again), finish, *rest)

    return defective


@plant("a cancelled request goes on", RequestLifecycle, "cancel", like="sglang#37103")
def _no_cancel(original: Method) -> Method:
    return nothing(original)


@plant("a waiting request loses its place", WaitingRequests, "remove")
def _stuck_wait(original: Method) -> Method:
    def defective(self: WaitingRequests, request_id: RequestId) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is not None and not wait.is_owed:
            self._num_tokens -= wait.num_tokens

    return defective


@plant("a new head is told of a request twice", Conductor, "_on_instance_joined")
def _no_resync(original: Method) -> Method:
    def defective(self: Conductor, info: Any, now: float) -> None:
        original(self, info, now)
        self.instances[info.instance_id].resyncing = False
        self._actions[:] = [a for a in self._actions if "Resync" not in repr(a)]

    return defective
