"""Checks that in a run nothing takes too long, happens twice, or happens without need; other
modules check tokens and sums. Each check exists because no other check finds some planted bug."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moonpool.conductor.conductor import Conductor
from moonpool.protocol.messages import BlocksChanged
from moonpool.request_record import RequestRecord
from moonpool.types import BlockKey, InstanceId, RequestId
from tests.sim.node import Life

if TYPE_CHECKING:
    from tests.sim.world import World

STRANDED_S = 8.0
"""For this long after the end of a request, transfers that will end on their own may hold its
blocks."""
CANCELLED_S = 0.6
"""For this long after the end of a request, its abort may still be on the way to a vLLM server."""
FAULT_REASONS = ("instance_lost", "engine_error", "no_blocks", "blocks_lost")


class Promises:
    """Follows one run and checks its promises."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._resyncs: Counter[InstanceId] = Counter()
        self._reasons: Counter[InstanceId] = Counter()
        self._late_tokens = 0  # time of requests that ended by their deadline

    # During a run:

    def on_joined(self, instance_id: InstanceId) -> None:
        self._reasons[instance_id] += 1

    def on_lost_event(self, instance_id: InstanceId, report: BlocksChanged) -> None:
        self._reasons[instance_id] += 1

    def on_resync(self, instance_id: InstanceId) -> None:
        """Asserts that one snapshot closes a gap: the Conductor must not ask again and again."""
        self._resyncs[instance_id] += 1
        asked, had = self._resyncs[instance_id], self._reasons[instance_id]
        assert asked <= had, f"{instance_id} was asked {asked} times for a snapshot, {had} needed"

    def on_leave(self, conductor: Conductor, instance_id: InstanceId) -> None:
        """Asserts that before its time is over, an instance leaves only when no request needs
        it."""
        drain = conductor.instances[instance_id].drain
        assert drain is not None
        if self._world.clock.now >= drain.until_s:
            return
        for tracked in conductor.requests.values():
            attempt = tracked.attempt
            if attempt is not None:
                needs = {attempt.decoder, attempt.fetch_from}
                if attempt.attempt_id in conductor.instances[instance_id].prefills:
                    needs.add(attempt.prefill)
                assert instance_id not in needs, f"{instance_id} leaves under a request"

    def on_ended(self, request_id: RequestId) -> None:
        slack_s = self._world.pauses.total_s
        self._world.clock.after(STRANDED_S + slack_s, lambda: self._check_freed(request_id))
        self._world.clock.after(CANCELLED_S + slack_s, lambda: self._check_cancelled(request_id))

    def _check_cancelled(self, request_id: RequestId) -> None:
        """Asserts that a vLLM server computes nothing for an ended request."""
        for server in self._world.vllm_servers.values():
            under_way = {name.rpartition("/")[0] for name in server.attempts()}
            assert request_id not in under_way, f"{server.name} goes on with {request_id}"

    def _check_freed(self, request_id: RequestId) -> None:
        for life in self._world.lives.values():
            if not life.alive:
                continue
            for attempt_id in life.attempts():
                if attempt_id.rpartition("/")[0] == request_id:
                    raise AssertionError(
                        f"{life.instance_id} holds {attempt_id} long after {request_id} ended"
                    )

    # At the end:

    def check_end(self, kept: set[BlockKey]) -> None:
        """`kept` has the blocks of which at least one copy is not marked as spare."""
        world = self._world
        own = [life for life in world.lives.values() if isinstance(life, Life)]
        cached = set[BlockKey]().union(*(life.instance.pool.keys() for life in own))
        assert cached <= kept, "every copy of a block is marked as spare"
        shares = world.conductor.lifecycle.shares
        assert not world.conductor.num_waiting and not shares.num_owed_waiting, "a wait never ended"
        if world.options.faultless and not world.lost_with_head:
            # A decode waits for KVCache up to its deadline, and may continue until its abort comes.
            recomputed = sum(life.instance.counters.get("recomputed_tokens", 0) for life in own)
            assert recomputed <= self._late_tokens, "a decode computed its prompt again"

    def check_refusal(self, record: RequestRecord, reason: str, deadline_s: float) -> None:
        """Asserts that a request is given up for a fault only after several attempts."""
        assert record.finished_s is not None
        if reason == "deadline":
            self._late_tokens += record.num_prompt_tokens + record.num_generated_tokens
        if reason in FAULT_REASONS and record.finished_s < deadline_s:
            assert record.attempts >= 3, f"{record.request_id} was given up at once: {reason}"


def check_times(record: RequestRecord) -> None:
    """Asserts that the record of an answer that needed one attempt has the times of all stages."""
    instants = [
        record.arrived_s,
        record.placed_s,
        record.prefill_started_s,
        record.prefill_done_s,
        record.decode_started_s if record.num_generated_tokens > 1 else record.prefill_done_s,
        record.first_token_s,
        record.last_token_s,
        record.finished_s,
    ]
    assert None not in instants, f"{record.request_id} does not say where its time went"
    assert instants == sorted(instants, key=lambda instant: instant or 0.0), record
