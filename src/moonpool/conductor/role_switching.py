"""Instances change between prefill and decode, as `role_balance` advises: one at a time, drained
before.

    serving --advice lasts--> draining --works over--> told --RoleChanged--> serving, the other role
                                 \\--time is up, or the last of a side died--> serving, as before

An instance that drains gets no new work; its works end as they would have. Its KVCache stays: what
it computed in one role is matched, and used, in the other. Soft state: an instance that joins says
what it is now, and a drain ends with the connection.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from moonpool.conductor.actions import Announce, ConductorAction, Send
from moonpool.conductor.bookings import Bookings
from moonpool.conductor.role_balance import Advice, Pools, RoleBalance
from moonpool.conductor.state import Drain, InstanceState
from moonpool.config import ConductorConfig
from moonpool.types import InstanceId, Role, Slo
from moonpool.workers.messages import SwitchRole

LEAST_DRAIN_S = 300.0
"""Answers may take minutes. A window's time is allowed for, and at least this."""
EVERY = 32
"""The ratio is looked at so often in a window."""


class RoleReport(NamedTuple):
    """For people: how the ratio fits, and what was done about it."""

    mode: str
    loads: Pools
    advice: Advice | None
    num_switches: dict[Role, int]  # by the role that was taken on
    num_given_up: int


class RoleSwitching:
    """Owns the drains. Books masks, nothing else."""

    def __init__(self, config: ConductorConfig, books: Bookings, slo: Slo) -> None:
        self.mode = config.role_balance
        self.num_switches: Counter[Role] = Counter()
        self.num_given_up = 0
        self.advice: Advice | None = None
        self._books = books
        limit = 1.0 if config.admission == "none" else config.load_limit
        self._balance = RoleBalance(config.role_balance_window_s, slo, limit)
        self._window_s = config.role_balance_window_s
        self._draining: InstanceState | None = None
        self._next_look_s = 0.0

    def note_arrival(
        self, num_tokens: int, cached_tokens: int, max_answer_tokens: int, now: float
    ) -> None:
        """A request, placed or refused."""
        if self.mode != "off":
            self._balance.note_arrival(num_tokens, cached_tokens, max_answer_tokens, now)

    def note_answer(self, num_prompt_tokens: int, num_generated: int) -> None:
        if self.mode != "off":
            self._balance.note_answer(num_prompt_tokens, num_generated)

    def tick(self, now: float) -> list[ConductorAction]:
        """Looks at the ratio, and at the drain under way."""
        if self.mode == "off":
            return []
        state = self._draining
        if state is not None:
            return self._go_on(state, now)
        if now < self._next_look_s:
            return []
        self._next_look_s = now + self._window_s / EVERY
        return self._look(now)

    def begin(self, instance_id: InstanceId, role: Role, why: str, now: float) -> None:
        """Drains an instance that is to become a `role` one; none other drains meanwhile."""
        state = self._books.instances[instance_id]
        assert self._draining is None and state.drain is None
        until_s = now + max(self._window_s, LEAST_DRAIN_S)
        state.drain = Drain(f"becomes {role}: {why}", now, until_s, role)
        self._draining = state
        self._books.fleet.set_role(state.row, prefills=False, decodes=False)

    def on_role_changed(self, state: InstanceState, role: Role, now: float) -> list[Announce]:
        """The instance's word: it serves as what it says."""
        drain = state.drain
        state.info = msgspec.structs.replace(state.info, role=role)
        if drain is not None and drain.becomes is None:
            return []  # it leaves, whatever it is
        self._return_to_service(state, now)
        if drain is None or drain.becomes is not role:
            return []
        self.num_switches[role] += 1
        lasted_s = now - drain.since_s
        return [self._say(f"{state.info.instance_id} is a {role} instance after {lasted_s:.0f} s")]

    def on_lost(self, state: InstanceState, now: float) -> list[Announce]:
        """It is gone, and its drain with it; or else a side may have lost its last instance to the
        one that drains."""
        if state is self._draining:
            self._draining = None
            self.num_given_up += 1
            self._balance.rest(now)
            return [self._say(f"{state.info.instance_id} was lost before it had switched")]
        return self._give_up_if_needed(now)

    def give_up(self, state: InstanceState, now: float) -> list[Announce]:
        """Ends the instance's drain, if it has one: something else is to become of it."""
        if state is not self._draining:
            return []
        return [self._give_up(state, "it is to leave", now)]

    def report(self, now: float) -> RoleReport:
        loads = self._balance.loads(self._books.fleet, now)
        return RoleReport(self.mode, loads, self.advice, dict(self.num_switches), self.num_given_up)

    def _look(self, now: float) -> list[ConductorAction]:
        fleet = self._books.fleet
        losses = [(0, 0)] * len(fleet)
        for instance_id, state in self._books.instances.items():
            num_works = len(state.prefills) + len(state.decodes)
            losses[state.row] = (num_works, self._books.index.num_blocks(instance_id))
        before, self.advice = self.advice, self._balance.advise(fleet, losses, now)
        advice = self.advice
        if advice is None:
            return []
        text = advice.describe(fleet.num_prefills, fleet.num_decodes)
        if self.mode == "advise":
            is_news = before is None or before.role is not advice.role
            return [self._say(text)] if is_news else []
        if not self._balance.may_switch(now):
            return []
        self.begin(advice.instance_id, advice.role, text, now)
        return [self._say(f"{text}; {advice.instance_id} drains to become {advice.role}")]

    def _go_on(self, state: InstanceState, now: float) -> list[ConductorAction]:
        drain = state.drain
        assert drain is not None
        if drain.told:
            return []
        if state.drained:
            drain.told = True
            assert drain.becomes is not None
            return [Send(state.info.instance_id, SwitchRole(role=drain.becomes))]
        given_up = self._give_up_if_needed(now)
        if given_up:
            return [*given_up]
        if now < drain.until_s:
            return []
        return [self._give_up(state, "its works last too long", now)]

    def _give_up_if_needed(self, now: float) -> list[Announce]:
        """Where nobody else is left to do what the draining instance did."""
        state, fleet = self._draining, self._books.fleet
        if state is None or state.drain is None or state.drain.told:
            return []
        num_left = fleet.num_prefills if state.info.role is Role.PREFILL else fleet.num_decodes
        if num_left:
            return []
        return [self._give_up(state, f"it is the last {state.info.role} instance", now)]

    def _give_up(self, state: InstanceState, why: str, now: float) -> Announce:
        self.num_given_up += 1
        self._return_to_service(state, now)
        return self._say(f"{state.info.instance_id} stays a {state.info.role} instance: {why}")

    def _return_to_service(self, state: InstanceState, now: float) -> None:
        state.drain = None
        if state is self._draining:
            self._draining = None
            self._balance.rest(now)
        role = state.info.role
        self._books.fleet.set_role(state.row, role.prefills, role.decodes)

    def _say(self, text: str) -> Announce:
        return Announce(f"role balance: {text}")
