"""What the Conductor does about instances rather than requests: changes of roles, departures, and
news of who else has a block. Hands on, decides nothing itself."""

from __future__ import annotations

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.bookings import Bookings
from moonpool.conductor.draining import Draining
from moonpool.conductor.role_switching import RoleSwitching
from moonpool.conductor.state import InstanceState
from moonpool.config import ConductorConfig
from moonpool.types import InstanceId, Slo
from moonpool.workers.messages import (
    HotPrefixes,
    ListHot,
    MarkCopies,
    RoleChanged,
    TakenOver,
    WantsToLeave,
)

MAX_COPY_NEWS = 8192
"""Blocks of which instances are told at a tick who else has them."""
MAX_WITHIN_S = 3600.0
ASKED_BY_PEOPLE = 0
"""The number of a list of hot prefixes that no drain asked for."""

UpkeepReport = RoleChanged | HotPrefixes | TakenOver | WantsToLeave


class Upkeep:
    def __init__(self, config: ConductorConfig, books: Bookings, slo: Slo) -> None:
        self.roles = RoleSwitching(config, books, slo)
        self.drains = Draining(books)
        self._books = books
        self._tells_copies = config.spare_copies_first

    def tick(self, now: float) -> list[ConductorAction]:
        actions = [*self.roles.tick(now), *self.drains.tick(now)]
        if self._tells_copies:
            for instance_id, news in self._books.index.take_copy_news(MAX_COPY_NEWS):
                command = MarkCopies(spare=tuple(news.spare), last=tuple(news.last))
                actions.append(Send(instance_id, command))
        return actions

    def drain(
        self, instance_id: InstanceId, within_s: float, why: str, now: float
    ) -> list[ConductorAction]:
        """Unknown instances are fine."""
        state = self._books.instances.get(instance_id)
        if state is None:
            return []
        given_up = self.roles.give_up(state, now)
        within_s = min(max(within_s, 0.0), MAX_WITHIN_S)
        return [*given_up, *self.drains.begin(state, within_s, why, now)]

    def ask_hot(self, num_blocks: int) -> list[ConductorAction]:
        command = ListHot(number=ASKED_BY_PEOPLE, num_blocks=num_blocks)
        return [Send(instance_id, command) for instance_id in self._books.instances]

    def on_report(
        self, state: InstanceState, report: UpkeepReport, now: float
    ) -> list[ConductorAction]:
        match report:
            case RoleChanged():
                return [*self.roles.on_role_changed(state, report.role, now)]
            case HotPrefixes():
                if report.number == ASKED_BY_PEOPLE:
                    state.hot = report
                    return []
                return self.drains.on_hot(state, report, now)
            case TakenOver():
                return self.drains.on_taken(report, now)
            case WantsToLeave():
                why = "its process was told to end"
                return self.drain(state.info.instance_id, report.within_s, why, now)

    def on_lost(self, state: InstanceState, now: float) -> list[ConductorAction]:
        return [*self.roles.on_lost(state, now), *self.drains.on_lost(state)]

    def validate(self) -> None:
        self.drains.validate()
