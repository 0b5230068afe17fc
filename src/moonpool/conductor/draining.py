"""Departures: an instance drains, hands over the KVCache that only it has, and leaves.

    serving --requested--> draining: hot blocks are handed over while its attempts end
            --attempts over, or half of the time--> remaining attempts are placed elsewhere
            --nothing left to hand over, or the time is up--> LeaveCluster --> gone

The Conductor decides which instance takes which prefix. The takers fetch the blocks from the
leaving instance as they fetch any prefix. Blocks in a shared store are not handed over.

Requests have priority. A taker must have `ROOM_SHARE` times the room that a prefix needs. A prefix
that no instance has room for waits until the attempts are placed elsewhere, and is dropped then. A
prefix occupies its taker for at most `FETCH_TIMEOUT_S`.

Drains are soft state. If the head is lost, an instance that received a signal requests its
departure again. An instance whose drain was requested through the head continues to serve.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from moonpool.conductor.actions import Announce, ConductorAction, Send
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import Drain, InstanceState, TrackedRequest
from moonpool.protocol.messages import (
    HotPrefix,
    HotPrefixes,
    LeaveCluster,
    ListHot,
    PrefixTakenOver,
    TakeOverPrefix,
)
from moonpool.types import InstanceId, RequestId

MAX_BLOCKS = 8192
MAX_BYTES = 16 << 30
"""The most that one instance hands over: the lower of both limits."""
MAX_FETCHES = 4
"""Concurrent fetches from a leaving instance; each taker makes at most one of them."""
MAX_TRIES = 3
"""Takers that are tried for one prefix."""
ROOM_SHARE = 2
"""A taker must have this multiple of the room for a prefix: the rest is for requests."""
MAX_WITHOUT_ROOM = 32
"""Prefixes without a taker that are considered each time."""
FETCH_TIMEOUT_S = 15.0
"""How long a taker's room is booked for one prefix; the blocks that arrive in time are kept."""
LIST_TIMEOUT_S = 5.0
"""A list of prefixes that does not come within this time is ignored, so the instance hands over
only what its next list has."""

_Tried = tuple[InstanceId, ...]


class _Unavailable(Enum):
    """Why no instance can take a prefix at present."""

    BUSY = "all possible takers are taking another one"
    NO_ROOM = "requests occupy the room"


@dataclass(slots=True, eq=False)
class _Departure:
    state: InstanceState
    move_s: float  # time at which the instance's attempts are placed elsewhere
    until_s: float  # time at which the instance leaves, whatever it still has to do
    num_blocks: int  # number of blocks that may still be handed over
    num_handed: int = 0
    list_number: int = 0  # number of the last requested list of prefixes
    requested_s: float | None = None  # time at which the outstanding list of prefixes was requested
    final: bool = False  # whether the list is the last one, requested after the attempts ended
    moved: bool = False
    # (prefix, takers that were tried)
    waiting: deque[tuple[HotPrefix, _Tried]] = field(default_factory=deque)
    num_fetches: int = 0
    num_failed: int = 0  # number of fetches that ended with an error
    last_error: str = ""
    # Instances that had no room for a prefix. The prefixes after it are colder, so these instances
    # would have no room for them either.
    full: set[InstanceId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _PrefixTransfer:
    """A prefix that an instance fetches; its room stays booked until the fetch has ended."""

    departure: _Departure
    taker: InstanceState
    prefix: HotPrefix
    tried: _Tried  # takers before this one
    num_tokens: int


class Draining(ClusterObserver):
    """Owns the drains that end with a departure. Books only roles and room."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self.num_left = self.num_handed_blocks = 0
        self._index, self._table = cluster_state.index, cluster_state.instance_table
        self._instances, self._is_bound = cluster_state.instances, cluster_state.is_bound
        self._departures: dict[InstanceId, _Departure] = {}
        self._fetches: dict[int, _PrefixTransfer] = {}
        self._numbers = count(1)

    def why_not(self, instance_id: InstanceId, returns: bool = False) -> str:
        """Returns why the instance must not leave, or "" if it may leave. The last instance of its
        role may leave if it is about to return."""
        state = self._instances.get(instance_id)
        if state is None:
            known = ", ".join(self._instances) or "none"
            return f"there is no instance {instance_id!r}; there are: {known}"
        what = self.sole_work(state)
        if what and not returns:
            return f"{instance_id} is the last instance that {what}: start another first"
        return ""

    def num_handed(self, instance_id: InstanceId) -> int:
        """Number of blocks that other instances have taken from the leaving one so far."""
        departure = self._departures.get(instance_id)
        return 0 if departure is None else departure.num_handed

    def begin(
        self,
        state: InstanceState,
        within_s: float,
        why: str,
        now: float,
        returns: bool = False,
    ) -> list[ConductorAction]:
        """Starts a departure that ends within `within_s` seconds. A second call may shorten the
        time. The instance must not drain for another reason. If the instance is the last one of its
        role and will return, its attempts move at once, because new requests wait for its return,
        and it can leave only when its attempts are over."""
        until_s = now + within_s
        known = self._departures.get(state.info.instance_id)
        if known is not None:
            known.until_s = min(known.until_s, until_s)
            if state.drain is not None:
                state.drain.until_s = known.until_s
            known.move_s = min(known.move_s, now + within_s / 2)
            return []
        assert state.drain is None
        moves_in_s = 0.0 if returns and self.sole_work(state) else within_s / 2
        state.drain = Drain(f"leaves: {why}", now, until_s, None, returns=returns)
        self._table.set_role(state.row, prefills=False, decodes=False)
        block_bytes = max(state.info.layout.block_bytes, 1)
        num_blocks = min(MAX_BLOCKS, MAX_BYTES // block_bytes)
        departure = _Departure(state, now + moves_in_s, until_s, num_blocks)
        self._departures[state.info.instance_id] = departure
        return [
            self._announce(departure, f"drains and leaves within {within_s:.0f} s: {why}"),
            *self._request_list(departure, now),
        ]

    def to_move(self, now: float) -> list[TrackedRequest]:
        """Returns the requests that must be placed elsewhere now. A request both of whose instances
        leave is returned once. An answer that could not continue elsewhere stays until the end."""
        found: dict[RequestId, TrackedRequest] = {}
        for departure in self._departures.values():
            if now >= departure.move_s and not departure.moved:
                departure.moved = True
                state = departure.state
                attempts = {**state.prefills, **state.handed_over, **state.decodes}
                needing = [
                    tracked
                    for tracked in attempts.values()
                    if _needs(state, tracked) and not self._is_bound(tracked)
                ]
                found.update({tracked.request.request_id: tracked for tracked in needing})
        return list(found.values())

    def tick(self, now: float) -> list[ConductorAction]:
        actions: list[ConductorAction] = []
        for departure in list(self._departures.values()):
            actions += self._advance(departure, now)
        return actions

    def on_hot(
        self, state: InstanceState, report: HotPrefixes, now: float
    ) -> list[ConductorAction]:
        departure = self._departures.get(state.info.instance_id)
        if (
            departure is None
            or departure.requested_s is None
            or report.number != departure.list_number
        ):
            return []
        departure.requested_s = None
        departure.waiting.extend((prefix, ()) for prefix in report.prefixes)
        return self._advance(departure, now)

    def prefix_taken(self, report: PrefixTakenOver, now: float) -> list[ConductorAction]:
        fetch = self._end_fetch(report.number)
        if fetch is None:
            return []
        departure, name = fetch.departure, fetch.taker.info.instance_id
        departure.num_handed += report.num_blocks
        departure.num_blocks -= report.num_blocks
        self.num_handed_blocks += report.num_blocks
        if report.full:
            departure.full.add(name)
        if report.error:
            departure.num_failed += 1
            departure.last_error = f"{name}: {report.error}"
        if report.full or report.error:
            self._try_another(fetch)
        return self._advance(departure, now)

    def on_lost(self, state: InstanceState) -> list[ConductorAction]:
        """Ends the departure of a lost instance, and the fetches that it made."""
        for number in [n for n, t in self._fetches.items() if t.taker is state]:
            fetch = self._fetches.pop(number)
            fetch.departure.num_fetches -= 1
            self._try_another(fetch)
        departure = self._departures.pop(state.info.instance_id, None)
        if departure is None:
            return []
        drain = state.drain
        if drain is None or not drain.commanded:
            return [self._announce(departure, "was lost before it had left in order")]
        self.num_left += 1
        text = f"has left; others took {departure.num_handed} of its blocks"
        if departure.num_failed:
            text += f"; {departure.num_failed} fetches failed, the last at {departure.last_error}"
        return [self._announce(departure, text)]

    def validate(self) -> None:
        """Asserts that departures, fetches and booked room agree."""
        booked = {number: fetch.taker for number, fetch in self._fetches.items()}
        for state in self._instances.values():
            assert set(state.handover_tokens) == {
                n for n, taker in booked.items() if taker is state
            }
        for instance_id, departure in self._departures.items():
            assert self._instances[instance_id] is departure.state
            assert departure.state.drain is not None
            fetch = sum(t.departure is departure for t in self._fetches.values())
            assert fetch == departure.num_fetches <= MAX_FETCHES

    def sole_work(self, state: InstanceState) -> str:
        """The work that only this instance does: "prefills", "decodes" or ""."""
        row, table = state.row, self._table
        for does, number, what in (
            (table.prefills[row], table.num_prefills, "prefills"),
            (table.decodes[row], table.num_decodes, "decodes"),
        ):
            if does and number == 1:
                return what
        return ""

    def _advance(self, departure: _Departure, now: float) -> list[ConductorAction]:
        state = departure.state
        drain = state.drain
        is_over = self._departures.get(state.info.instance_id) is not departure
        if drain is None or drain.commanded or is_over:
            return []
        if now >= departure.until_s:
            return self._leave(departure, drain)
        if departure.requested_s is not None:
            if now < departure.requested_s + LIST_TIMEOUT_S:
                return []
            departure.requested_s = None
        actions = self._hand_over(departure, now)
        if departure.waiting or departure.num_fetches:
            return actions
        if state.drained and not state.serving:
            if departure.final:
                return [*actions, *self._leave(departure, drain)]
            # the last attempts have added blocks, so one more list is requested
            departure.final = True
            return [*actions, *self._request_list(departure, now)]
        return actions

    def _request_list(self, departure: _Departure, now: float) -> list[ConductorAction]:
        departure.list_number += 1
        departure.requested_s = now
        num_blocks = max(departure.num_blocks, 0)
        command = ListHot(number=departure.list_number, num_blocks=num_blocks, lost_with_it=True)
        return [Send(departure.state.info.instance_id, command)]

    def _leave(self, departure: _Departure, drain: Drain) -> list[ConductorAction]:
        drain.commanded = True
        departure.waiting.clear()
        return [Send(departure.state.info.instance_id, LeaveCluster())]

    def _hand_over(self, departure: _Departure, now: float) -> list[ConductorAction]:
        """Starts as many fetches as may run at a time. A prefix that finds no room is tried again
        later, and colder prefixes are tried meanwhile."""
        actions: list[ConductorAction] = []
        later: list[tuple[HotPrefix, _Tried]] = []
        while departure.waiting and departure.num_fetches < MAX_FETCHES:
            if len(later) == MAX_WITHOUT_ROOM:
                break
            prefix, tried = departure.waiting[0]
            taker, num_missing, obstacle = self._choose_taker(departure, prefix, tried)
            if obstacle is _Unavailable.BUSY:
                break
            departure.waiting.popleft()
            if obstacle is _Unavailable.NO_ROOM and now < departure.move_s:
                later.append((prefix, tried))
            elif taker is not None and num_missing <= departure.num_blocks:
                command = self._start_fetch(departure, taker, prefix, tried, num_missing, now)
                actions.append(command)
        departure.waiting.extendleft(reversed(later))
        return actions

    def _start_fetch(
        self,
        departure: _Departure,
        taker: InstanceState,
        prefix: HotPrefix,
        tried: _Tried,
        num_missing: int,
        now: float,
    ) -> Send:
        number = next(self._numbers)
        num_tokens = num_missing * taker.info.layout.block_tokens
        self._fetches[number] = _PrefixTransfer(departure, taker, prefix, tried, num_tokens)
        departure.num_fetches += 1
        taker.handover_tokens[number] = num_tokens
        self._table.room_tokens[taker.row] -= num_tokens
        command = TakeOverPrefix(
            number=number,
            source=departure.state.info.address,
            keys=prefix.keys,
            num_uses=prefix.num_uses,
            timeout_s=min(max(departure.until_s - now, 1.0), FETCH_TIMEOUT_S),
        )
        return Send(taker.info.instance_id, command)

    def _choose_taker(
        self, departure: _Departure, prefix: HotPrefix, tried: _Tried
    ) -> tuple[InstanceState | None, int, _Unavailable | None]:
        """The instance that should fetch the prefix, the number of its missing blocks, and why
        possible takers cannot take it now. If there is neither a taker nor a reason, a staying
        instance has the whole prefix, or no other instance is large enough for it, has room for
        prefixes as cold as this one, or is untried."""
        index, table = self._index, self._table
        held = index.match(prefix.keys).held
        best: tuple[int, bool, int] | None = None
        chosen, num_missing, obstacle = None, 0, None
        for instance_id, state in self._instances.items():
            if state.drain is not None:
                continue
            here = int(held.item(state.row))
            missing = len(prefix.keys) - here
            if not missing:
                return None, 0, None
            wanted_tokens = ROOM_SHARE * missing * state.info.layout.block_tokens
            size_tokens = state.info.num_blocks * state.info.layout.block_tokens
            if instance_id in tried or instance_id in departure.full:
                continue
            if size_tokens < wanted_tokens:
                continue
            if state.handover_tokens:
                obstacle = _Unavailable.BUSY
                continue
            if table.room_tokens[state.row] < wanted_tokens:
                obstacle = obstacle or _Unavailable.NO_ROOM
                continue
            empty = state.info.num_blocks - index.num_blocks(instance_id)
            rank = (here, state.role.prefills, empty)
            if best is None or rank > best:
                best, chosen, num_missing = rank, state, missing
        return chosen, num_missing, obstacle if chosen is None else None

    def _try_another(self, fetch: _PrefixTransfer) -> None:
        """Lets another instance take a prefix that its taker could not take."""
        tried = (*fetch.tried, fetch.taker.info.instance_id)
        if len(tried) < MAX_TRIES:
            fetch.departure.waiting.appendleft((fetch.prefix, tried))

    def _end_fetch(self, number: int) -> _PrefixTransfer | None:
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            fetch.departure.num_fetches -= 1
            del fetch.taker.handover_tokens[number]
            self._table.room_tokens[fetch.taker.row] += fetch.num_tokens
        return fetch

    def _announce(self, departure: _Departure, text: str) -> Announce:
        return Announce(f"drain: {departure.state.info.instance_id} {text}")


def _needs(state: InstanceState, tracked: TrackedRequest) -> bool:
    """Whether the request needs this instance. The request no longer needs an instance that has
    handed it over once the decode instance has accepted it."""
    attempt = tracked.attempt
    if attempt is None:
        return False
    done = attempt.attempt_id in state.handed_over and attempt.phase.value == "decode"
    return not done or attempt.decoder == state.info.instance_id
