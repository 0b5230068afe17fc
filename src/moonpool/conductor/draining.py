"""Instances that leave: they get no new work, end or lose what they have, hand over what only they
have cached, and go.

    serving --asked--> draining: hot blocks are handed over while its works end
            --works over, or half of the time--> works that still run are placed elsewhere
            --nothing left to hand over, or the time is up--> told to leave --> gone

Who takes what is decided here; the blocks are fetched by those who take them, from the one that
leaves, as any prefix is fetched. What a shared store keeps is not handed over. Requests come first:
whoever takes something has as much room left, and something that nobody has room for waits until
the works are placed elsewhere, and is let go then; no taker is held up beyond `TAKE_S`.
It is soft state: if the head is lost, an instance that was told
to end by a signal asks again, and one that was drained by request serves on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from moonpool.conductor.actions import Announce, ConductorAction, Send
from moonpool.conductor.bookings import Bookings
from moonpool.conductor.state import Drain, InstanceState, Tracked
from moonpool.types import InstanceId
from moonpool.workers.messages import HotPrefix, HotPrefixes, Leave, ListHot, TakenOver, TakeOver

MAX_BLOCKS = 8192
MAX_BYTES = 16 << 30
"""Of what one instance hands over, whichever is less."""
MAX_TAKING = 4
"""Fetches from an instance that leaves, at a time; no instance makes two of them."""
MAX_TRIES = 3
"""So many are asked to take a prefix."""
ROOM_SHARE = 2
"""A taker must have room for so many times what it takes: the rest is for requests."""
MAX_WITHOUT_ROOM = 32
"""So many that find no room are looked at each time."""
TAKE_S = 15.0
"""So long a taker's room is booked for one prefix; what has come by then is kept."""
ANSWER_S = 5.0
"""An instance that does not say within this time what it has, hands nothing over."""


class _Hindered(Enum):
    """Why nobody takes a prefix just now."""

    BUSY = "who could is taking another one"
    NO_ROOM = "requests have it"


@dataclass(slots=True, eq=False)
class _Departure:
    state: InstanceState
    move_s: float  # then its works are placed elsewhere
    until_s: float  # then it goes, whatever is left
    num_blocks: int  # that it may still hand over
    num_handed: int = 0
    round: int = 0  # how often it was asked what it has
    asked_s: float | None = None  # it has not answered yet
    final: bool = False  # it was asked when its works were over
    moved: bool = False
    waiting: deque[tuple[HotPrefix, int]] = field(default_factory=deque)  # and tries
    num_taking: int = 0
    full: set[InstanceId] = field(default_factory=set)  # who had no room for anything as cold


@dataclass(slots=True, eq=False)
class _Taking:
    """What an instance was told to fetch; its room is booked until it says that it has ended."""

    departure: _Departure
    taker: InstanceState
    prefix: HotPrefix
    num_tries: int
    num_tokens: int


class Draining:
    """Owns the drains that end with a departure. Books masks and room, nothing else."""

    def __init__(self, books: Bookings) -> None:
        self.num_left = self.num_handed_blocks = 0
        self._books = books
        self._departures: dict[InstanceId, _Departure] = {}
        self._taking: dict[int, _Taking] = {}
        self._numbers = count(1)

    def why_not(self, instance_id: InstanceId) -> str:
        """Why it cannot be spared; "" if it can."""
        state, fleet = self._books.instances.get(instance_id), self._books.fleet
        if state is None:
            known = ", ".join(self._books.instances) or "none"
            return f"there is no instance {instance_id!r}; there are: {known}"
        row = state.row
        for does, number, what in (
            (fleet.prefills[row], fleet.num_prefills, "prefills"),
            (fleet.decodes[row], fleet.num_decodes, "decodes"),
        ):
            if does and number == 1:
                return f"{instance_id} is the last instance that {what}: start another first"
        return ""

    def num_handed(self, instance_id: InstanceId) -> int:
        """Blocks that others have taken from it so far."""
        departure = self._departures.get(instance_id)
        return 0 if departure is None else departure.num_handed

    def begin(
        self, state: InstanceState, within_s: float, why: str, now: float
    ) -> list[ConductorAction]:
        """It is to be gone after so many seconds; again, if that is sooner than was said before.
        It must not be draining for another reason."""
        until_s = now + within_s
        known = self._departures.get(state.info.instance_id)
        if known is not None:
            known.until_s = min(known.until_s, until_s)
            known.move_s = min(known.move_s, now + within_s / 2)
            return []
        assert state.drain is None
        state.drain = Drain(f"leaves: {why}", now, until_s, None)
        self._books.fleet.set_role(state.row, prefills=False, decodes=False)
        block_bytes = max(state.info.layout.block_bytes, 1)
        num_blocks = min(MAX_BLOCKS, MAX_BYTES // block_bytes)
        departure = _Departure(state, now + within_s / 2, until_s, num_blocks)
        self._departures[state.info.instance_id] = departure
        return [
            self._say(departure, f"drains and leaves within {within_s:.0f} s: {why}"),
            *self._ask(departure, now),
        ]

    def to_move(self, now: float) -> list[Tracked]:
        """Works that are to be placed elsewhere now, each once (mutates)."""
        found: list[Tracked] = []
        for departure in self._departures.values():
            if now >= departure.move_s and not departure.moved:
                departure.moved = True
                state = departure.state
                works = {**state.prefills, **state.handed_over, **state.decodes}
                found += [t for t in works.values() if _needs(state, t)]
        return found

    def tick(self, now: float) -> list[ConductorAction]:
        actions: list[ConductorAction] = []
        for departure in list(self._departures.values()):
            actions += self._go_on(departure, now)
        return actions

    def on_hot(
        self, state: InstanceState, report: HotPrefixes, now: float
    ) -> list[ConductorAction]:
        departure = self._departures.get(state.info.instance_id)
        if departure is None or departure.asked_s is None or report.number != departure.round:
            return []
        departure.asked_s = None
        departure.waiting.extend((prefix, 0) for prefix in report.prefixes)
        return self._go_on(departure, now)

    def on_taken(self, report: TakenOver, now: float) -> list[ConductorAction]:
        taking = self._end_taking(report.number)
        if taking is None:
            return []
        departure, name = taking.departure, taking.taker.info.instance_id
        departure.num_handed += report.num_blocks
        departure.num_blocks -= report.num_blocks
        self.num_handed_blocks += report.num_blocks
        if report.full:
            departure.full.add(name)
        if report.full and taking.num_tries + 1 < MAX_TRIES:
            departure.waiting.appendleft((taking.prefix, taking.num_tries + 1))
        return self._go_on(departure, now)

    def on_lost(self, state: InstanceState) -> list[ConductorAction]:
        """An instance is gone, and what it was booked for with it."""
        for number in [n for n, t in self._taking.items() if t.taker is state]:
            taking = self._taking.pop(number)
            taking.departure.num_taking -= 1
        departure = self._departures.pop(state.info.instance_id, None)
        if departure is None:
            return []
        drain = state.drain
        if drain is None or not drain.told:
            return [self._say(departure, "was lost before it had left in order")]
        self.num_left += 1
        return [self._say(departure, f"has left; others took {departure.num_handed} of its blocks")]

    def validate(self) -> None:
        """Asserts that all room booked for takers is accounted for."""
        booked = {number: taking.taker for number, taking in self._taking.items()}
        for state in self._books.instances.values():
            assert set(state.taking) == {n for n, taker in booked.items() if taker is state}
        for instance_id, departure in self._departures.items():
            assert self._books.instances[instance_id] is departure.state
            assert departure.state.drain is not None
            taking = sum(t.departure is departure for t in self._taking.values())
            assert taking == departure.num_taking <= MAX_TAKING

    def _go_on(self, departure: _Departure, now: float) -> list[ConductorAction]:
        state = departure.state
        drain = state.drain
        if drain is None or drain.told or state.info.instance_id not in self._departures:
            return []
        if now >= departure.until_s:
            return self._leave(departure, drain)
        if departure.asked_s is not None:
            if now < departure.asked_s + ANSWER_S:
                return []
            departure.asked_s = None
        actions = self._hand_over(departure, now)
        if departure.waiting or departure.num_taking:
            return actions
        if state.drained and not state.serving:
            if departure.final:
                return [*actions, *self._leave(departure, drain)]
            departure.final = True  # its last works left blocks behind, too
            return [*actions, *self._ask(departure, now)]
        return actions

    def _ask(self, departure: _Departure, now: float) -> list[ConductorAction]:
        departure.round += 1
        departure.asked_s = now
        num_blocks = max(departure.num_blocks, 0)
        command = ListHot(number=departure.round, num_blocks=num_blocks, lost_with_it=True)
        return [Send(departure.state.info.instance_id, command)]

    def _leave(self, departure: _Departure, drain: Drain) -> list[ConductorAction]:
        drain.told = True
        departure.waiting.clear()
        return [Send(departure.state.info.instance_id, Leave())]

    def _hand_over(self, departure: _Departure, now: float) -> list[ConductorAction]:
        """Has as much of what waits fetched as may be under way at a time. What finds no room may
        do so later; what is less used does not wait behind it."""
        actions: list[ConductorAction] = []
        later: list[tuple[HotPrefix, int]] = []
        while departure.waiting and departure.num_taking < MAX_TAKING:
            if len(later) == MAX_WITHOUT_ROOM:
                break
            prefix, num_tries = departure.waiting[0]
            taker, num_missing, hindered = self._taker_of(departure, prefix)
            if hindered is _Hindered.BUSY:
                break
            departure.waiting.popleft()
            if hindered is _Hindered.NO_ROOM and now < departure.move_s:
                later.append((prefix, num_tries))
            elif taker is not None and num_missing <= departure.num_blocks:
                taken = self._have_taken(departure, taker, prefix, num_tries, num_missing, now)
                actions.append(taken)
        departure.waiting.extendleft(reversed(later))
        return actions

    def _have_taken(
        self,
        departure: _Departure,
        taker: InstanceState,
        prefix: HotPrefix,
        num_tries: int,
        num_missing: int,
        now: float,
    ) -> Send:
        number = next(self._numbers)
        num_tokens = num_missing * taker.info.layout.block_tokens
        self._taking[number] = _Taking(departure, taker, prefix, num_tries, num_tokens)
        departure.num_taking += 1
        taker.taking[number] = num_tokens
        self._books.fleet.room_tokens[taker.row] -= num_tokens
        command = TakeOver(
            number=number,
            source=departure.state.info.address,
            keys=prefix.keys,
            num_uses=prefix.num_uses,
            timeout_s=min(max(departure.until_s - now, 1.0), TAKE_S),
        )
        return Send(taker.info.instance_id, command)

    def _taker_of(
        self, departure: _Departure, prefix: HotPrefix
    ) -> tuple[InstanceState | None, int, _Hindered | None]:
        """Who should fetch the prefix, how many blocks that are, and what keeps those from it who
        could. Nobody, and nothing does, if one that stays has all of it, or none has the size."""
        index, fleet = self._books.index, self._books.fleet
        held = index.match(prefix.keys).held
        best: tuple[int, bool, int] | None = None
        chosen, num_missing, hindered = None, 0, None
        for instance_id, state in self._books.instances.items():
            if state.drain is not None:
                continue
            here = int(held.item(state.row))
            missing = len(prefix.keys) - here
            if not missing:
                return None, 0, None
            wanted_tokens = ROOM_SHARE * missing * state.info.layout.block_tokens
            size_tokens = state.info.num_blocks * state.info.layout.block_tokens
            if instance_id in departure.full or size_tokens < wanted_tokens:
                continue
            if state.taking:
                hindered = _Hindered.BUSY
                continue
            if fleet.room_tokens[state.row] < wanted_tokens:
                hindered = hindered or _Hindered.NO_ROOM
                continue
            empty = state.info.num_blocks - index.num_blocks(instance_id)
            rank = (here, state.info.role.prefills, empty)
            if best is None or rank > best:
                best, chosen, num_missing = rank, state, missing
        return chosen, num_missing, hindered if chosen is None else None

    def _end_taking(self, number: int) -> _Taking | None:
        taking = self._taking.pop(number, None)
        if taking is not None:
            taking.departure.num_taking -= 1
            del taking.taker.taking[number]
            self._books.fleet.room_tokens[taking.taker.row] += taking.num_tokens
        return taking

    def _say(self, departure: _Departure, text: str) -> Announce:
        return Announce(f"drain: {departure.state.info.instance_id} {text}")


def _needs(state: InstanceState, tracked: Tracked) -> bool:
    """Whether a work of this instance would be lost with it. What it handed over is the decode
    instance's, once that has accepted."""
    attempt = tracked.attempt
    if attempt is None:
        return False
    done = attempt.work_id in state.handed_over and attempt.stage.value == "decode"
    return not done or attempt.decoder == state.info.instance_id
