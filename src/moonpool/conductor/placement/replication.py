"""Copies a hot prefix to another prefill instance before a request has to fetch it there.

A prefix that many sessions begin with (a system prompt, a document) causes prefill work wherever it
is cached. When its sessions bring more work than its holders should have, Algorithm 1 will soon
send one of them to another instance, where it waits for a fetch. So the Conductor measures the work
that the sessions of each prefix bring per second, and lets one more instance copy the prefix while
no request waits for it. The copying instances replace blocks that are used less
(`scheduler.loading.handover`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.instance_table import S_PER_NS
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.protocol.messages import MarkReplicas, PrefixTakenOver, TakeOverPrefix
from moonpool.types import BlockKey

MIN_BLOCKS = 4
"""A prefix with fewer blocks is fetched or computed in almost no time."""
WINDOW_S = 30.0
"""The memory of the measured work: older work fades by 1 / e in this time."""
MAX_WORK_PER_HOLDER = 0.1
"""Seconds of prefill per second that the sessions of a prefix may bring to each of its holders."""
MIN_SESSIONS = 4
MAX_PREFIXES = 1024
MAX_FETCHES = 2
"""Prefixes that are copied at the same time."""
FETCH_TIMEOUT_S = 15.0
MAX_MARKED_REPLICAS = 8192
"""Blocks per tick whose number of replicas is sent to the instances."""
ROOM_SHARE = 4
"""A taker must have this multiple of the room that the prefix needs: the rest is for requests."""


@dataclass(slots=True, eq=False)
class _Prefix:
    keys: Sequence[BlockKey]
    noted_s: float
    work_s: float = 0.0  # faded
    num_sessions: int = 0


class Replication(ClusterObserver):
    """The prefixes that several sessions began with, and the copies under way."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self.num_blocks = 0  # number of blocks copied so far
        self._index, self._table = cluster_state.index, cluster_state.instance_table
        self._instances = cluster_state.instances
        self._prefixes: OrderedDict[BlockKey, _Prefix] = OrderedDict()  # prefixes by their last key
        self._busy: dict[BlockKey, None] = {}  # prefixes to examine at the next tick
        # (last key of the prefix, time when the wait for the copy ends), by number
        self._fetches: dict[int, tuple[BlockKey, float]] = {}
        self._last_number = 0

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        """Notes the work of a request that was placed without waiting. Only the first turn of a
        session counts: later turns follow the session's own blocks."""
        attempt = tracked.attempt
        if attempt is None or tracked.num_turns:
            return
        if not self._instances[attempt.prefill].info.caches_prefixes:
            return
        num_held = len(tracked.keys) - len(attempt.expected_keys)
        if num_held < MIN_BLOCKS:
            return
        leaf = tracked.keys[num_held - 1]
        prefix = self._prefixes.get(leaf)
        if prefix is None:
            prefix = self._prefixes[leaf] = _Prefix(tracked.keys[:num_held], now)
            if len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(leaf)
        prefix.work_s = prefix.work_s * exp((prefix.noted_s - now) / WINDOW_S)
        prefix.work_s += attempt.prefill_ns * S_PER_NS
        prefix.noted_s = now
        prefix.num_sessions += 1
        if prefix.num_sessions >= MIN_SESSIONS:
            self._busy[leaf] = None

    def tick(self, now: float) -> Iterator[ConductorAction]:
        """Yields the commands for prefixes whose holders have too much work."""
        for number, (_, until_s) in list(self._fetches.items()):
            if now > until_s:
                del self._fetches[number]
        while self._busy and len(self._fetches) < MAX_FETCHES:
            leaf = next(iter(self._busy))
            del self._busy[leaf]
            prefix = self._prefixes.get(leaf)
            if prefix is None or any(leaf == fetched for fetched, _ in self._fetches.values()):
                continue
            chosen = self._choose(prefix)
            if chosen is not None:
                taker, source = chosen
                # negative, because the fetches of a departure have positive numbers
                self._last_number -= 1
                self._fetches[self._last_number] = leaf, now + FETCH_TIMEOUT_S + 1.0
                command = TakeOverPrefix(
                    number=self._last_number,
                    source=source.info.address,
                    keys=tuple(prefix.keys),
                    num_uses=prefix.num_sessions,
                    timeout_s=FETCH_TIMEOUT_S,
                )
                yield Send(taker.info.instance_id, command)
        self._busy.clear()

    def prefix_taken(self, report: PrefixTakenOver, now: float) -> Sequence[ConductorAction]:
        """Notes that a copy has ended. Ignores prefixes of a departure."""
        if self._fetches.pop(report.number, None) is not None:
            self.num_blocks += report.num_blocks
        return ()

    def _choose(self, prefix: _Prefix) -> tuple[InstanceState, InstanceState] | None:
        """Returns the instance that should take the prefix, and an instance that has it, or None if
        its holders suffice or no other instance has the room."""
        match, table = self._index.match(prefix.keys), self._table
        near = match.held if match.held_in_dram is None else match.held_in_dram
        num_blocks = len(prefix.keys)
        states = [state for state in self._instances.values() if state.drain is None]
        whole = [state for state in states if near.item(state.row) >= num_blocks]
        holders = [state for state in whole if table.prefills[state.row]]
        if not whole or prefix.work_s / WINDOW_S <= MAX_WORK_PER_HOLDER * max(len(holders), 1):
            return None
        wanted = ROOM_SHARE * num_blocks * states[0].info.layout.block_tokens
        takers = [
            state
            for state in states
            if table.prefills[state.row]
            and near.item(state.row) < num_blocks
            and table.room_tokens[state.row] >= wanted
        ]
        if not takers:
            return None
        taker = min(takers, key=lambda state: table.waiting_ns[state.row])
        return taker, min(whole, key=lambda state: table.num_serving[state.row])


class ReplicaMarks(ClusterObserver):
    """Tells the instances which of their blocks are additional replicas, which are evicted
    first."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def tick(self, now: float) -> Iterator[ConductorAction]:
        for instance_id, changes in self._index.take_replica_changes(MAX_MARKED_REPLICAS):
            command = MarkReplicas(spare=tuple(changes.spare), last=tuple(changes.last))
            yield Send(instance_id, command)
