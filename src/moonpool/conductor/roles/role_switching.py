"""Switches instances between prefill and decode, as `role_balance` advises. All instances of one
advice switch together, and no other instance switches before they have finished.

    serving --lasting advice--> draining --prefills over--> SwitchRole --RoleChanged--> new role
                                 \\--time is up, or a pool lost its last instance--> old role

A draining instance gets no new work; its prefills end as usual, which takes seconds. The answers of
a draining instance, which may take minutes, are not waited for. These answers end in the new role:
a prefill instance computes its prompts beside them in chunks that keep their TBT SLO, and is
expected to be slower by that (`InstanceTable.remainders`). The KVCache of the instance remains:
blocks computed in one role are matched and used in the other. A switch is soft state: an instance
joins with its present role, and a drain ends with the connection.

Mixed instances that have separate roles (`roles.mixed_split`) switch in any mode, and without a
command, as they take both kinds of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from moonpool.conductor.actions import Announce, ConductorAction, Send
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.roles.autoscale import Autoscale
from moonpool.conductor.roles.mixed_split import assign_roles
from moonpool.conductor.roles.role_balance import Pools, RoleAdvice, RoleBalance
from moonpool.conductor.state import Drain, InstanceState, TrackedRequest
from moonpool.config.tables import ConductorConfig
from moonpool.protocol.messages import SwitchRole
from moonpool.types import InstanceId, Role, Slo

LEAST_DRAIN_S = 300.0
"""The limit of a drain is the window, but at least this time: a prompt may take minutes."""
CHECK_S = 2.0
"""Longest time between checks of the ratio; shorter where the window is short."""
CHECKS_PER_WINDOW = 32


class RoleReport(NamedTuple):
    """State of the role balance, for `/cluster` and metrics."""

    mode: str
    loads: Pools
    advice: RoleAdvice | None
    num_switches: dict[Role, int]  # number of switches, by the new role
    num_given_up: int


class RoleSwitching(ClusterObserver):
    """Owns the drains that end with a new role. Books roles only."""

    def __init__(self, config: ConductorConfig, cluster_state: ClusterState, slo: Slo) -> None:
        self.mode = config.role_balance
        self.num_switches: Counter[Role] = Counter()
        self.num_given_up = 0
        self.advice: RoleAdvice | None = None
        self.autoscale: Autoscale | None = None
        self._cluster_state = cluster_state
        limit = 1.0 if config.admission == "none" else config.load_limit
        serves_least = config.admission == "goodput"
        self._balance = RoleBalance(config.role_balance_window_s, slo, limit, serves_least)
        self._window_s = config.role_balance_window_s
        self._sizes_chunks, self._tbt_slo_s = config.inline_chunks, slo.tbt_s
        self._is_split = False  # whether mixed instances have separate roles
        if config.autoscale:
            self.autoscale = Autoscale(self._balance, config.autoscale_load, self._window_s)
        self._draining: dict[InstanceId, InstanceState] = {}
        self._next_check_s = 0.0

    @property
    def _tracks(self) -> bool:
        return self.mode != "off" or self._is_split or self.autoscale is not None

    def considered(self, tracked: TrackedRequest, now: float) -> None:
        """Adds a request to the demand, whether it was placed or rejected."""
        if self._tracks:
            request, cached_tokens = tracked.request, tracked.found_tokens
            assert cached_tokens is not None
            num_tokens = request.num_prompt_tokens + len(tracked.generated)
            max_tokens = request.sampling.max_tokens
            self._balance.note_arrival(num_tokens, cached_tokens, max_tokens, now)

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        if self._tracks:
            record = tracked.record
            self._balance.note_answer(
                tracked.request.num_prompt_tokens,
                record.cached_tokens or 0,
                record.num_generated_tokens,
            )

    def tick(self, now: float) -> list[ConductorAction]:
        """Checks the ratio of roles or the drains under way, and how many instances are wanted."""
        wanted: list[ConductorAction] = []
        if self.autoscale is not None:
            wanted += self.autoscale.tick(self._cluster_state.instance_table, now)
        return wanted + self.assign_roles() + self._tick_roles(now)

    def _tick_roles(self, now: float) -> list[ConductorAction]:
        if self._draining:
            states = list(self._draining.values())
            return [action for state in states for action in self._advance(state, now)]
        if self.mode == "off" and not self._is_split:
            return []
        if now < self._next_check_s:
            return []
        self._next_check_s = now + min(self._window_s / CHECKS_PER_WINDOW, CHECK_S)
        self._balance.note_running(self._running())
        return self._check(now)

    def begin(self, instance_id: InstanceId, role: Role, why: str, now: float) -> None:
        """Drains an instance that will switch to the role `role`."""
        state = self._cluster_state.instances[instance_id]
        assert state.drain is None
        until_s = now + max(self._window_s, LEAST_DRAIN_S)
        state.drain = Drain(f"becomes {role}: {why}", now, until_s, role)
        self._draining[instance_id] = state
        self._cluster_state.instance_table.set_role(state.row, prefills=False, decodes=False)

    def on_role_changed(self, state: InstanceState, role: Role, now: float) -> list[Announce]:
        """Records the role that an instance reports."""
        state.info = msgspec.structs.replace(state.info, role=role)
        return self._take_role(state, role, now)

    def _take_role(self, state: InstanceState, role: Role, now: float) -> list[Announce]:
        drain, state.role = state.drain, role
        if drain is not None and drain.becomes is None:
            return []  # the instance leaves the cluster, whatever its role
        self._return_to_service(state)
        if drain is None or drain.becomes is not role:
            return []
        self.num_switches[role] += 1
        lasted_s = now - drain.since_s
        return [
            self._announce(f"{state.info.instance_id} is a {role} instance after {lasted_s:.0f} s")
        ]

    def on_lost(self, state: InstanceState, now: float) -> list[Announce]:
        """Ends the drain of a lost instance. If another instance was lost, gives up the drain when
        its pool has no instance left."""
        return self._end_drains(state, now) + self.assign_roles()

    def _end_drains(self, state: InstanceState, now: float) -> list[Announce]:
        if self._draining.pop(state.info.instance_id, None) is not None:
            self.num_given_up += 1
            self._balance.pause(now)
            return [self._announce(f"{state.info.instance_id} was lost before it had switched")]
        given_up = (self._give_up_if_needed(each, now) for each in list(self._draining.values()))
        return [announce for announces in given_up for announce in announces]

    def give_up(self, state: InstanceState, now: float) -> list[Announce]:
        """Ends the instance's drain for a role, if any, because it leaves."""
        if state.info.instance_id not in self._draining:
            return []
        return [self._give_up(state, "it is to leave", now)]

    def report(self, now: float) -> RoleReport:
        loads = self._balance.loads(self._cluster_state.instance_table, now)
        # mixed instances follow the demand in any mode
        mode = "switch" if self._is_split else self.mode
        return RoleReport(mode, loads, self.advice, dict(self.num_switches), self.num_given_up)

    def _check(self, now: float) -> list[ConductorAction]:
        table = self._cluster_state.instance_table
        losses = [(0, 0)] * len(table)
        for instance_id, state in self._cluster_state.instances.items():
            num_works = len(state.prefills) + len(state.decodes)
            losses[state.row] = (num_works, self._cluster_state.index.num_blocks(instance_id))
        movable = None
        if self._is_split and self.mode != "switch":
            movable = [state.row for state in self._mixed()]
        before, self.advice = self.advice, self._balance.advise(table, losses, now, movable)
        advice = self.advice
        if advice is None:
            return []
        text = advice.describe(table.num_prefills, table.num_decodes)
        if self.mode == "advise" and not self._is_split:
            is_new = before is None or before.role is not advice.role
            return [self._announce(text)] if is_new else []
        if not self._balance.may_switch(now):
            return []
        self._balance.note_switch(advice.role, now)
        for instance_id in advice.instance_ids:
            self.begin(instance_id, advice.role, text, now)
        names = " and ".join(advice.instance_ids)
        return [self._announce(f"{text}; to become {advice.role}, these drain: {names}")]

    def _mixed(self) -> list[InstanceState]:
        """Returns the instances that were started as mixed and do not leave."""
        states = self._cluster_state.instances.values()
        return [each for each in states if each.info.role is Role.MIXED and each.drain is None]

    def assign_roles(self) -> list[Announce]:
        """Decides whether mixed instances have separate roles, and gives roles to those that have
        none. Must be called when instances have joined, were lost or leave."""
        if not self._sizes_chunks:
            return []
        table, mixed, was_split = self._cluster_state.instance_table, self._mixed(), self._is_split
        switching = self._draining.values()
        num_switching = sum(state.info.role is Role.MIXED for state in switching)
        self._is_split = assign_roles(table, mixed, num_switching, self._tbt_slo_s)
        if self._is_split is was_split or not mixed:
            return []
        if not self._is_split:
            return [self._announce("mixed instances take both roles again")]
        why = "the TBT SLO leaves too little room for prompts beside decodes"
        return [self._announce(f"{why}: mixed instances have one role each")]

    def _running(self) -> Iterator[tuple[int, int, int]]:
        """Yields for each answer under way the tokens of its prompt, how many of these were
        cached, and the tokens of the answer."""
        for state in self._cluster_state.instances.values():
            for tracked in state.decodes.values():
                if tracked.generated:
                    cached = tracked.record.cached_tokens or 0
                    yield tracked.request.num_prompt_tokens, cached, len(tracked.generated)

    def _advance(self, state: InstanceState, now: float) -> list[ConductorAction]:
        drain = state.drain
        assert drain is not None
        if drain.commanded:
            return []
        if state.prefilled:
            drain.commanded = True
            assert drain.becomes is not None
            if state.info.role is Role.MIXED:
                return [*self._take_role(state, drain.becomes, now)]
            return [Send(state.info.instance_id, SwitchRole(role=drain.becomes))]
        given_up = self._give_up_if_needed(state, now)
        if given_up:
            return [*given_up]
        if now < drain.until_s:
            return []
        return [self._give_up(state, "its prompts last too long", now)]

    def _give_up_if_needed(self, state: InstanceState, now: float) -> list[Announce]:
        """Gives up a drain if no other instance has the draining instance's role."""
        table = self._cluster_state.instance_table
        if state.drain is None or state.drain.commanded:
            return []
        num_left = table.num_prefills if state.role is Role.PREFILL else table.num_decodes
        if num_left:
            return []
        return [self._give_up(state, f"it is the last {state.role} instance", now)]

    def _give_up(self, state: InstanceState, why: str, now: float) -> Announce:
        self.num_given_up += 1
        self._balance.pause(now)
        self._return_to_service(state)
        return self._announce(f"{state.info.instance_id} stays a {state.role} instance: {why}")

    def _return_to_service(self, state: InstanceState) -> None:
        state.drain = None
        self._draining.pop(state.info.instance_id, None)
        role = state.role
        self._cluster_state.instance_table.set_role(state.row, role.prefills, role.decodes)

    def _announce(self, text: str) -> Announce:
        return Announce(f"role balance: {text}")
