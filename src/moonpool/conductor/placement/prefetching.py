"""Brings the blocks of a session from an SSD to DRAM before its next turn is due.

A session waits from the end of an answer until a prompt continues it, which means that the prompt
contains the last full block of the session's prompt. `TurnForecast` learns how long that takes.

A waiting session on an SSD belongs in DRAM only if its next turn is expected sooner than the next
turns of the sessions that leave DRAM now. So the Conductor notes at which expected rate of return
sessions are demoted, and prefetches a session once its own rate is well above that. The rate of a
session changes only where a range of ages begins, so each session is examined a few times.

The instance begins the load when it has the room, and never while a load for a request runs
(`scheduler.loading.prefetch`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.conductor.forecast.turn_forecast import (
    AGE_LIMITS_S,
    SessionClass,
    TurnForecast,
    session_class,
)
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.protocol.messages import PrefetchBlocks
from moonpool.types import BlockKey

MAX_WAITING_BLOCKS = 1 << 19
"""Blocks of all waiting sessions that are remembered; the oldest sessions are given up first."""
RATE_FACTOR = 1.5
"""A session must be expected this many times sooner than those that are demoted."""
MIN_CHANCE = 0.3
"""Smallest probability that the next turn comes before the blocks would leave DRAM again."""
MAX_PREFETCHES = 2
"""Prefetches of one session in one pause."""
MAX_EXAMINED = 32
"""Sessions that one tick examines at most."""
MAX_TO_EXAMINE = 1024


@dataclass(slots=True, eq=False)
class _Session:
    keys: Sequence[BlockKey]
    since_s: float  # time at which the session's last answer ended
    num_turns: int
    of: SessionClass
    num_prefetches: int = 0
    demoted: bool = False  # whether the session's last block has left the DRAM of an instance
    waiting: bool = True


class Prefetching(ClusterObserver):
    """The sessions that wait for their next turn, and which of them are due for a prefetch."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self.forecast = TurnForecast()
        self._index, self._table = cluster_state.index, cluster_state.instance_table
        self._instances = cluster_state.instances
        # waiting sessions, keyed by the last full block of the prompt
        self._waiting: OrderedDict[BlockKey, _Session] = OrderedDict()
        self._num_blocks = 0
        # Waiting sessions by range of ages, in the order in which they reach its end. Some of these
        # sessions may no longer wait.
        self._by_age: list[deque[_Session]] = [deque() for _ in AGE_LIMITS_S]
        self._to_examine: deque[_Session] = deque(maxlen=MAX_TO_EXAMINE)
        self._demoted_rate = RunningMean(0.0)
        self._demoted_age_s = RunningMean(0.0)

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        """The session that the prompt continues no longer waits."""
        keys = tracked.keys
        if not keys or self._waiting.keys().isdisjoint(keys):
            return
        for key in reversed(keys):
            session = self._waiting.get(key)
            if session is not None:
                self._forget(key)
                pause_s = now - session.since_s
                self.forecast.note_returned(session.of, pause_s)
                tracked.num_turns, tracked.pause_s = session.num_turns, pause_s
                return

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        """Notes that the session of this answer now waits for its next turn."""
        keys = tracked.keys
        if not keys:
            return
        leaf, num_turns = keys[-1], tracked.num_turns + 1
        if leaf in self._waiting:
            self._forget(leaf)
        program = tracked.program
        of = session_class(num_turns, tracked.pause_s) if program is None else program.pause_class
        session = _Session(keys, now, num_turns, of)
        self._waiting[leaf] = session
        self._by_age[0].append(session)
        self._num_blocks += len(keys)
        while self._num_blocks > MAX_WAITING_BLOCKS:
            self._forget(next(iter(self._waiting)))

    def blocks_demoted(self, keys: Iterable[BlockKey], now: float) -> None:
        waiting = self._waiting
        for key in keys:
            session = waiting.get(key)
            if session is not None:
                age_s = now - session.since_s
                self._demoted_rate.add(self.forecast.rate_per_s(session.of, age_s))
                self._demoted_age_s.add(age_s)
                session.demoted = True

    def tick(self, now: float) -> Iterator[ConductorAction]:
        """Yields the commands for sessions that are due."""
        self._age(now)
        for _ in range(min(len(self._to_examine), MAX_EXAMINED)):
            session = self._to_examine.popleft()
            if session.waiting and self._is_due(session, now - session.since_s):
                command = self._command(session)
                if command is not None:
                    session.num_prefetches += 1
                    yield command

    def _age(self, now: float) -> None:
        """Moves sessions to their present ranges of ages. The rate of a session changes where a
        range begins, so sessions on an SSD are examined then."""
        for number, limit_s in enumerate(AGE_LIMITS_S):
            sessions = self._by_age[number]
            while sessions and sessions[0].since_s + limit_s <= now:
                session = sessions.popleft()
                if not session.waiting:
                    continue
                self.forecast.note_passed(session.of, number)
                if number + 1 < len(AGE_LIMITS_S):
                    self._by_age[number + 1].append(session)
                if session.demoted and session.num_prefetches < MAX_PREFETCHES:
                    self._to_examine.append(session)

    def _is_due(self, session: _Session, age_s: float) -> bool:
        rate = self.forecast.rate_per_s(session.of, age_s)
        if rate < RATE_FACTOR * self._demoted_rate.value:
            return False
        stay_s = self._demoted_age_s.value
        return self.forecast.chance(session.of, age_s, stay_s) >= MIN_CHANCE

    def _command(self, session: _Session) -> Send | None:
        """Returns the command for the instance that holds most of the session, preferably one that
        prefills, or None if some instance has as much in DRAM."""
        match, table = self._index.match(session.keys), self._table
        near = match.held_in_dram
        if not match.deepest or near is None or near.max() == match.deepest:
            return None
        rows = [int(row) for row in (match.held == match.deepest).nonzero()[0]]
        row = max(rows, key=lambda row: (bool(table.prefills[row]), near.item(row)))
        instance_id = table.ids[row]
        if self._instances[instance_id].drain is not None:
            return None
        return Send(instance_id, PrefetchBlocks(keys=tuple(session.keys[: match.deepest])))

    def _forget(self, leaf: BlockKey) -> None:
        session = self._waiting.pop(leaf)
        session.waiting = False
        self._num_blocks -= len(session.keys)

    def validate(self) -> None:
        """Asserts that the number of blocks is right and within its bound."""
        assert self._num_blocks == sum(len(one.keys) for one in self._waiting.values())
        assert self._num_blocks <= MAX_WAITING_BLOCKS
