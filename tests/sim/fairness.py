"""Checks that tenants get their shares: who waits is placed in the order of priority, of what its
tenant was given over its share, and of arrival; and nobody takes a place that another one is owed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.fair_share import ACTIVE_S, HALF_LIFE_S
from moonpool.conductor.state import TrackedRequest
from moonpool.protocol.messages import StartPrefill
from moonpool.types import Request

if TYPE_CHECKING:
    from tests.sim.world import World


class Fairness:
    """Keeps its own account of what each tenant was given by one Conductor."""

    def __init__(self, world: World, conductor: Conductor) -> None:
        self._world = world
        self._weights = dict(world.options.tenants)
        self._given: dict[str, tuple[float, float]] = {}  # tokens over the share, and when
        self._seen_s: dict[str, float] = {}
        self._waiting = conductor._lifecycle.waiting
        self._shares = conductor._lifecycle.shares
        self._give, self._due = self._shares.give, self._waiting.due
        self._shares.give = self._note_given  # type: ignore[method-assign]
        self._waiting.due = self._checked_due  # type: ignore[method-assign]

    def level(self, request: Request) -> float:
        return self._level_of(_payer(request))

    def must_wait(self, request: Request) -> bool:
        """Whether a new request would take a place that another tenant's request is owed."""
        now, payer = self._world.clock.now, _payer(request)
        self._seen_s[payer] = now
        owed = {_payer(w.tracked.request) for w in self._waiting._waits.values() if w.is_owed}
        active = [name for name, seen_s in self._seen_s.items() if now - seen_s <= ACTIVE_S]
        if not owed - {payer} or len(active) < 2:
            return False
        levels = {name: self._level_of(name) for name in active}
        return levels[payer] > sum(levels.values()) / len(levels) * (1 + 1e-9)

    def check_arrival(self, request: Request, actions: list[ConductorAction]) -> None:
        self._world.seen["requests that yield"] += 1
        for action in actions:
            if isinstance(action, Send) and isinstance(action.command, StartPrefill):
                started = action.command.work.attempt_id.rpartition("/")[0]
                assert started != request.request_id, f"{started} takes a place of another tenant"

    def _level_of(self, payer: str) -> float:
        given, at_s = self._given.get(payer, (0.0, 0.0))
        return float(given * 0.5 ** ((self._world.clock.now - at_s) / HALF_LIFE_S))

    def _note_given(self, tenant: str, num_tokens: float, now: float) -> None:
        assert "/" not in tenant, "a cache salt has a share of its own"
        if tenant in self._seen_s:
            given = self._level_of(tenant) + num_tokens / self._weights.get(tenant, 1.0)
            self._given[tenant] = given, now
        self._give(tenant, num_tokens, now)
        level = self._shares.level(tenant, now)
        assert abs(level - self._level_of(tenant)) < 1e-6 * (1 + level), (
            f"{tenant} was given {self._level_of(tenant)} over its share, and has {level}"
        )

    def _checked_due(self, now: float) -> Iterator[TrackedRequest]:
        """Asserts that no other request that waits was before the one that is tried."""
        waits = self._waiting._waits.values()
        left = [wait.tracked for wait in waits if wait.not_before_s <= now]
        classes = self._classes(left, now)
        for tracked in self._due(now):
            own = self._place(tracked, classes)
            others = [self._place(other, classes) for other in left]
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

    def _place(self, tracked: TrackedRequest, classes: dict[str, int]) -> tuple[int, float]:
        return classes[tracked.request.request_id], round(self.level(tracked.request), 6)


def _payer(request: Request) -> str:
    return request.tenant.split("/")[0]
