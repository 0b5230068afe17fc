"""Applies the rules of programs to their calls: which calls wait, which blocks stay cached, and
which blocks are evicted first.

This is the only part of `programs` that the life of a request calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.attempt_planner import name_blocks
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import PlannedAttempt, Rejection
from moonpool.conductor.programs.door import Door
from moonpool.conductor.programs.program import Program
from moonpool.conductor.programs.programs import Programs
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.conductor.waiting.queue import WaitingRequests
from moonpool.config.tables import ProgramRules
from moonpool.protocol.messages import MarkReplicas


class ProgramKeeper(ClusterObserver):
    """Applies the rules of programs to their calls; appends the commands for instances to
    `actions`."""

    def __init__(
        self,
        rules: ProgramRules,
        cluster_state: ClusterState,
        waiting: WaitingRequests,
        actions: list[ConductorAction],
    ) -> None:
        self.programs = Programs(waiting)
        self._recognises = rules == "all"
        self._is_on = rules != "off"
        self._cluster_state = cluster_state
        self._index, self._instances = cluster_state.index, cluster_state.instances
        self._table = cluster_state.instance_table
        self.door = Door(self.programs, cluster_state.instance_table)
        self._actions = actions

    def arrived(self, tracked: TrackedRequest, now: float) -> None:
        """Finds the program that a request is a call of, if there is one."""
        if not self._is_on:
            return
        program, layout = self.programs.arrive(tracked, now), self._cluster_state.layout
        if program is None and self._recognises and layout is not None:
            name_blocks(tracked, tracked.request.token_ids, layout)
            program = self.programs.recognise(tracked, now)
        if program is None:
            return
        tracked.program = program
        tracked.record.program = program.program_id
        named = tracked.request.program
        if program.parent is not None:
            tracked.record.parent_program = program.parent.program_id
        elif named is not None:  # the parent program has not sent a call yet
            tracked.record.parent_program = named.parent_id
        tracked.explanation.add(_describe(program, now))
        if program.parked:
            program.parked = False
            self._mark(program, leaves_first=False)

    def why_wait(self, tracked: TrackedRequest, now: float) -> Rejection | None:
        """The reason why the call waits for its program, or None if it need not wait. Notes the
        instances to which a call that need not wait should not move (`tracked.crowded`)."""
        if tracked.program is None:
            return None
        why = self.door.why_wait(tracked, now)
        if why is None:
            tracked.crowded = self.door.crowded(tracked, now)
        return why

    def placed(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        program = tracked.program
        if program is not None:
            self.programs.place(tracked, planned.placement.hit_tokens)
            is_new = program.num_calls == 1 and tracked.num_attempts == 1
            usual = self.programs.usual_tokens.value
            self.door.note_begun(program, max(program.own_tokens, usual) if is_new else 0.0)

    def ended(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        program = tracked.program
        if program is None:
            return
        ended = self.programs.end_call(tracked, is_answered, now)
        if not program.root.has_begun:
            self.door.leave(program)
        if ended is not None:
            self.door.note_ended()
            self._mark(ended, leaves_first=True)

    def tick(self, now: float) -> Sequence[ConductorAction]:
        """Adds commands to `actions` that make the blocks of programs which pause for long leave
        first. Returns no action."""
        for program in self.programs.tick(now):
            self._mark(program, leaves_first=True)
        return ()

    def marks_dropped(self, state: InstanceState) -> None:
        """Marks the blocks of parked programs again at an instance that dropped its marks, as every
        instance does before a snapshot."""
        name, holds = state.info.instance_id, self._index.holds
        for program in self.programs:
            if program.parked and program.keys and holds(name, program.keys[0]):
                self._mark(program, leaves_first=True, only=state)

    def _mark(
        self, program: Program, leaves_first: bool, only: InstanceState | None = None
    ) -> None:
        """Tells the instances that hold the program's own blocks, or `only` one of them, whether
        these leave DRAM first. Blocks that other programs began with do not count as the program's
        own. Spare replicas (`kvcache.eviction.replicas`) leave first in any case."""
        keys = program.keys
        if not keys or not self._instances:
            return
        layout = next(iter(self._instances.values())).info.layout
        first = program.shared_tokens // layout.block_tokens
        own = tuple(keys[first:])
        if not own:
            return
        held = self._index.match(keys).held
        for row in (held > first).nonzero()[0]:
            name = self._table.ids[int(row)]
            state = self._instances.get(name)
            if state is None or (only is not None and state is not only):
                continue
            there = own[: int(held.item(row)) - first]
            if leaves_first:
                self._index.park(name, there)
                self._actions.append(Send(name, MarkReplicas(spare=there)))
            elif last := self._index.unpark(name, there):
                self._actions.append(Send(name, MarkReplicas(last=tuple(last))))


def _describe(program: Program, now: float) -> str:
    """The line of `/explain` about a call's program."""
    text = f"call {program.num_calls} of program {program.program_id}"
    if program.parent is not None:
        text += f", of {program.parent.program_id}"
    if not program.is_named:
        text += " (recognised by its prompt)"
    if program.pause_s is not None:
        text += f"; it paused for {program.pause_s:.1f} s"
        text += ", so its blocks were the first to leave" if program.parked else ""
    if not program.root.has_begun:
        text += "; it has not begun"
    return text
