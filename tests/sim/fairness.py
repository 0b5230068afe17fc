"""Checks that tenants get their shares. Waiting requests are placed in the order of priority, then
of the tenant's present and past use over its share, then of arrival. No request takes a place that
another tenant's request is owed, and an answer gives way only to a tenant that has less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.placement.choice import PlannedAttempt
from moonpool.conductor.state import HALF_LIFE_S, ShareAccount, TrackedRequest
from moonpool.conductor.waiting.fair_share import ACTIVE_S
from moonpool.protocol.messages import StartPrefill
from moonpool.types import Request

if TYPE_CHECKING:
    from tests.sim.world import World

FOLDING = 0.05
"""The relative difference that is allowed between a level and one that decays at each token."""


class Fairness:
    """Keeps an account of each tenant's present and past use at one Conductor, independent of the
    Conductor's own."""

    def __init__(self, world: World, conductor: Conductor) -> None:
        self._world = world
        self._weights = dict(world.options.tenants)
        # by tenant: computed tokens over the share, and the time of the last ones
        self._computed: dict[str, tuple[float, float]] = {}
        self._seen_s: dict[str, float] = {}
        self._lifecycle = conductor.lifecycle
        self._waiting, self._shares = self._lifecycle.waiting, self._lifecycle.shares
        self._begin, self._due = self._shares.begin, self._waiting.due
        self._book, self._deliver = self._lifecycle.book, self._lifecycle.deliver
        self._pause = self._lifecycle.pause
        self._place = self._lifecycle.place
        self._placing: TrackedRequest | None = None
        self._shares.begin = self._noted_begin  # type: ignore[method-assign]
        self._waiting.due = self._checked_due  # type: ignore[method-assign]
        self._lifecycle.book = self._noted_book  # type: ignore[method-assign]
        self._lifecycle.deliver = self._noted_deliver  # type: ignore[method-assign]
        self._lifecycle.pause = self._checked_pause  # type: ignore[method-assign]
        self._lifecycle.place = self._noted_place  # type: ignore[method-assign]

    def must_wait(self, request: Request) -> bool:
        """Whether a new request would take a place that another tenant's request is owed."""
        now, payer = self._world.clock.now, _payer(request)
        self._seen_s[payer] = now
        owed = {_payer(w.tracked.request) for w in self._waiting if w.is_owed}
        active = {name for name, seen_s in self._seen_s.items() if now - seen_s <= ACTIVE_S}
        active |= {_payer(tracked.request) for tracked in self._lifecycle.requests.values()}
        if not owed - {payer} or len(active) < 2:
            return False
        levels = {name: self._level_of(name) for name in active}
        return levels[payer] > sum(levels.values()) / len(levels) * (1 + 2 * FOLDING) + 1

    def check_arrival(self, request: Request, actions: list[ConductorAction]) -> None:
        self._world.seen["requests that yield"] += 1
        for action in actions:
            if isinstance(action, Send) and isinstance(action.command, StartPrefill):
                started = action.command.attempt.attempt_id.rpartition("/")[0]
                assert started != request.request_id, f"{started} takes a place of another tenant"

    def _level_of(self, payer: str) -> float:
        computed, at_s = self._computed.get(payer, (0.0, 0.0))
        computed *= 0.5 ** ((self._world.clock.now - at_s) / HALF_LIFE_S)
        held = 0
        for tracked in self._lifecycle.requests.values():
            if _payer(tracked.request) == payer and tracked.attempt is not None:
                held += tracked.attempt.booked_tokens
        return computed + held / self._weights.get(payer, 1.0)

    def _note_computed(self, tracked: TrackedRequest, num_tokens: int) -> None:
        payer, now = _payer(tracked.request), self._world.clock.now
        before, at_s = self._computed.get(payer, (0.0, 0.0))
        before *= 0.5 ** ((now - at_s) / HALF_LIFE_S)
        self._computed[payer] = before + num_tokens / self._weights.get(payer, 1.0), now

    def _check_level(self, payer: str) -> None:
        own, level = self._level_of(payer), self._shares.level(payer, self._world.clock.now)
        assert abs(level - own) < FOLDING * own + 1, (
            f"{payer} has and had {own} over its share, and its level is {level}"
        )

    def _noted_begin(self, tenant: str, now: float) -> ShareAccount:
        assert "/" not in tenant, "a cache salt has a share of its own"
        return self._begin(tenant, now)

    def _noted_book(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        is_first = not tracked.num_attempts
        self._book(tracked, planned, now)
        if is_first:
            num_tokens = planned.footprint.num_tokens - planned.placement.hit_tokens
            self._note_computed(tracked, num_tokens)
        self._check_level(_payer(tracked.request))

    def _noted_deliver(self, tracked: TrackedRequest, tokens: Any, *rest: Any) -> None:
        self._note_computed(tracked, len(tokens))
        self._deliver(tracked, tokens, *rest)

    def _noted_place(self, tracked: TrackedRequest, now: float) -> None:
        self._placing = tracked
        self._place(tracked, now)
        self._placing = None

    def _checked_pause(self, tracked: TrackedRequest, now: float) -> None:
        """Asserts that the answer gives way to a tenant that has less, and that the answer's tenant
        keeps at least as much as that tenant."""
        if self._placing is None:
            assert self._world.options.engine == "vllm", "nobody asks for its room"
            self._pause(tracked, now)
            return
        winner, loser = _payer(self._placing.request), _payer(tracked.request)
        assert winner != loser, "a tenant takes its own room"
        assert tracked.request.priority >= self._placing.request.priority, "it is more urgent"
        self._world.seen["answers that give way"] += 1
        before = self._shares.level(loser, now)
        self._pause(tracked, now)
        less = self._shares.level(loser, now)
        assert less < before
        assert less >= self._shares.level(winner, now) - 1e-6, "the other tenant has more"

    def _checked_due(self, now: float) -> Iterator[TrackedRequest]:
        """Asserts that no other waiting request comes before the request that is tried."""
        left = [wait.tracked for wait in self._waiting if self._waiting.is_due(wait, now)]
        classes = self._classes(left, now)
        for tracked in self._due(now):
            own = self._place_of(tracked, classes)
            others = [self._place_of(other, classes) for other in left]
            self._world.seen["waiting requests of several tenants"] += len(set(others)) > 1
            assert own <= min(others), f"{tracked.request.request_id} passes another's request"
            mine = [t for t in left if _payer(t.request) == _payer(tracked.request)]
            mine = [t for t in mine if classes[t.request.request_id] == own[0]]
            assert mine[0] is tracked, f"{tracked.request.request_id} passes an older request"
            left.remove(tracked)
            yield tracked

    def _classes(self, waiting: list[TrackedRequest], now: float) -> dict[str, int]:
        best = min((t.request.priority for t in waiting), default=0)
        found: dict[str, int] = {}
        for tracked in waiting:
            request = tracked.request
            aged = now >= (request.arrived_s + request.deadline_s) / 2
            found[request.request_id] = best if aged else request.priority
        return found

    def _place_of(self, tracked: TrackedRequest, classes: dict[str, int]) -> tuple[int, float]:
        level = self._shares.level(_payer(tracked.request), self._world.clock.now)
        return classes[tracked.request.request_id], round(level, 6)


def _payer(request: Request) -> str:
    return request.tenant.split("/")[0]
