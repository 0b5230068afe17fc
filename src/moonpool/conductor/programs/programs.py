"""The programs that are under way: their calls, what they hold, and when they go on.

The identity of a program is what its client says (`ProgramContext`); programs of different tenants
are never the same. With `programs="all"`, a prompt that goes on after an earlier one is a call of
the same program, too (`placement.prefetching` finds the session).

A program's blocks are kept through a pause as long as the learned length of the pause makes them
worth their room. The worth of a program's own blocks is the chance that its next call comes before
the room would serve others, `HORIZON_S`. Below `PARK_CHANCE` the program is *parked*: its blocks
are the first to leave DRAM, for the SSD if there is one, and `placement.prefetching` brings them
back before the next call is due. A parked program no longer counts where new ones wait (`Door`). A
program ends when its client says so, or after a pause longer than all ranges of ages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from moonpool.conductor.actions import ConductorAction, Send
from moonpool.conductor.attempt_planner import name_blocks
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.conductor.forecast.turn_forecast import (
    AGE_LIMITS_S,
    SessionClass,
    TurnForecast,
    session_class,
)
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import PROGRAMS_WAIT, PlannedAttempt, Rejection
from moonpool.conductor.programs.program import Program
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting.queue import WaitingRequests
from moonpool.config.tables import ProgramRules
from moonpool.protocol.messages import MarkReplicas
from moonpool.types import LEAD, BlockKey, InstanceId, ProgramContext, payer_of

MAX_CLASSES = 4096
"""Kinds and tools that are told apart; further ones share their classes."""


class Pauses:
    """How long programs pause between two calls, by program, kind and tool. Learns from pauses that
    end, and from the ages that others reach.

    A program pauses from the end of an answer until its next call arrives: its tool runs, or a
    person thinks. The curves are those of sessions (`conductor.forecast.turn_forecast`). A pause
    belongs to the class of its tool if the client names one, to that of programs of its kind, and
    to that of the last pause of the program itself. A pause that lasts longer than all ranges of
    ages counts as the program's end.
    """

    def __init__(self) -> None:
        self.forecast = TurnForecast()
        self._named: dict[tuple[str, str], int] = {}

    def begin(self, program: Program, tool: str, now: float) -> None:
        """Notes that the program's last call has ended."""
        program.since_s, program.num_ranges = now, 0
        name = (program.kind, tool)
        number = self._named.get(name)
        if number is None:
            number = len(self._named) + 1 if len(self._named) < MAX_CLASSES else 0
            if number:
                self._named[name] = number
        program.pause_class = self._class_of(program, number)

    def _class_of(self, program: Program, number: int) -> SessionClass:
        num_turns, pause = session_class(program.num_calls, program.pause_s)
        return number * 8 + num_turns, pause

    def end(self, program: Program, now: float) -> None:
        """Notes that the program's next call has arrived."""
        if program.since_s is None:
            return
        self.age(program, now)
        program.pause_s = now - program.since_s
        self.forecast.note_returned(program.pause_class, program.pause_s)
        program.since_s = None

    def age(self, program: Program, now: float) -> bool:
        """Notes the ages that the pause has reached. Returns whether it exceeds all ranges."""
        assert program.since_s is not None
        age_s = now - program.since_s
        limits = AGE_LIMITS_S
        while program.num_ranges < len(limits) and limits[program.num_ranges] <= age_s:
            self.forecast.note_passed(program.pause_class, program.num_ranges)
            program.num_ranges += 1
        return program.num_ranges == len(limits)

    def chance(self, program: Program, within_s: float, now: float) -> float:
        """The probability that the program's next call comes within this time."""
        if program.since_s is None:
            return 1.0
        return self.forecast.chance(program.pause_class, now - program.since_s, within_s)


MAX_PROGRAMS = 4096
"""The most programs that are remembered. The tenant with the most programs loses those that have
paused for longest."""
HORIZON_S = 30.0
"""If a pause should be shorter than this, the blocks stay in place."""
PARK_CHANCE = 0.1
MAX_PARKED_PER_TICK = 64
MAX_LOOKS_PER_TICK = 256
"""Programs that a tick looks at, in turns: a client that invents names costs no more."""
MAX_DEPTH = 16
"""Sub-agents of sub-agents; deeper ones count as children of the deepest."""

Key = tuple[str, str]
"""Tenant and id."""


class Programs:
    """All programs that have begun or wait to, and have not ended."""

    def __init__(self, waiting: WaitingRequests) -> None:
        """`waiting` assigns places in the order of those that wait."""
        self.pauses = Pauses()
        self.num_ended = 0
        self.usual_tokens = RunningMean(0.0)  # that a program needs for itself after a call
        self._programs: OrderedDict[Key, Program] = OrderedDict()  # the last one acted last
        self._num_of: Counter[str] = Counter()  # by tenant
        self._by_leaf: dict[BlockKey, Program] = {}  # of those that were recognised
        self._num_programs = self._num_recognised = self._looked_at = 0
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    @property
    def num_running(self) -> int:
        """Programs of which a call is under way."""
        return sum(program.num_running > 0 for program in self._programs.values())

    @property
    def num_parked(self) -> int:
        return sum(program.parked for program in self._programs.values())

    def get(self, tenant: str, program_id: str) -> Program | None:
        return self._programs.get((payer_of(tenant), program_id))

    # Calls

    def arrive(self, tracked: TrackedRequest, now: float) -> Program | None:
        """Notes that a call has arrived and returns its program, or None for a standalone
        request."""
        context = tracked.request.program
        if context is None:
            return None
        program = self._named(payer_of(tracked.request.tenant), context, now)
        self.pauses.end(program, now)
        program.num_running += 1
        program.num_calls += 1
        program.chance = 1.0
        program.tool = context.tool
        if context.keep_s is not None:
            program.keep_until_s = now + context.keep_s
        return program

    def recognise(self, tracked: TrackedRequest, now: float) -> Program | None:
        """Finds the program of an unnamed request by its blocks: the program whose last prompt it
        continues, or else a new one."""
        for key in reversed(tracked.keys):
            program = self._by_leaf.get(key)
            if program is not None and not program.num_running:
                break
        else:
            program = self._new(payer_of(tracked.request.tenant), f"~{self._num_recognised}", now)
            self._num_recognised += 1
            program.is_named = False
        self._programs.move_to_end((program.tenant, program.program_id))
        self.pauses.end(program, now)
        program.num_running += 1
        program.num_calls += 1
        program.chance = 1.0
        return program

    def _named(self, tenant: str, context: ProgramContext, now: float) -> Program:
        program = self._programs.get((tenant, context.program_id))
        if program is None:
            parent = self._parent_of(tenant, context)
            program = self._new(tenant, context.program_id, now, parent)
            program.blocks_parent = context.blocks_parent
        self._programs.move_to_end((tenant, program.program_id))
        program.kind = context.kind or program.kind
        return program

    def _parent_of(self, tenant: str, context: ProgramContext) -> Program | None:
        """The program that started it, if it has begun here. A lead may be named by its task."""
        named = context.parent_id or context.root_id
        task = named.removesuffix(f":{LEAD}")
        for parent_id in (named, task if task != named else f"{task}:{LEAD}"):
            parent = self._programs.get((tenant, parent_id))
            if parent_id and parent_id != context.program_id and parent is not None:
                return parent
        return None

    def _new(
        self, tenant: str, program_id: str, now: float, parent: Program | None = None
    ) -> Program:
        depth, above = 0, parent
        while above is not None and depth <= MAX_DEPTH:
            depth, above = depth + 1, above.parent
        if depth > MAX_DEPTH and parent is not None:
            parent = parent.parent
        line = self._waiting.line if parent is None else parent.root.line
        self._num_programs += 1
        program = Program(program_id, tenant, line, self._num_programs, now, parent)
        if parent is not None:
            program.has_begun = parent.root.has_begun
            parent.children.append(program)
        self._programs[tenant, program_id] = program
        self._num_of[tenant] += 1
        if len(self._programs) > MAX_PROGRAMS:
            ((most, _),) = self._num_of.most_common(1)
            oldest = next((p for p in self if p.tenant == most and not p.num_running), None)
            if oldest is not None:
                self._forget(oldest)
        return program

    def place(self, tracked: TrackedRequest, hit_tokens: int, now: float) -> None:
        """Notes that an attempt of a call is booked. `hit_tokens` of its prompt are where it is
        prefilled."""
        program, attempt = tracked.program, tracked.attempt
        assert program is not None and attempt is not None
        if not program.context_tokens:
            program.shared_tokens = hit_tokens
        known = min(program.context_tokens, tracked.request.num_prompt_tokens)
        program.recomputed_tokens += max(known - hit_tokens, 0) if tracked.num_attempts == 1 else 0
        program.waited_s += max(now - tracked.request.arrived_s, 0.0)
        program.context_tokens = max(program.context_tokens, tracked.request.num_prompt_tokens)
        program.has_begun = program.root.has_begun = True
        program.instance = attempt.decoder

    def end_call(self, tracked: TrackedRequest, answered: bool, now: float) -> Program | None:
        """Notes that a call has ended. Returns its program if that has ended, too."""
        program = tracked.program
        if program is None:
            return None
        program.num_running -= 1
        record, context = tracked.record, tracked.request.program
        if answered:
            size = record.num_prompt_tokens + record.answer_tokens
            program.context_tokens = size
            self.usual_tokens.add(program.own_tokens)
            program.served_tokens += size - min(record.cached_tokens, record.num_prompt_tokens)
            if program.keys:
                self._by_leaf.pop(program.keys[-1], None)
            program.keys = tracked.keys
            if not program.is_named and program.keys:
                self._by_leaf[program.keys[-1]] = program
        if program.num_running:
            return None
        if context is not None and context.ends and answered:
            self._forget(program)
            return program
        self.pauses.begin(program, "" if context is None else context.tool, now)
        return None

    def _forget(self, program: Program) -> None:
        if self._programs.pop((program.tenant, program.program_id), None) is not None:
            self._num_of[program.tenant] -= 1
            if not self._num_of[program.tenant]:
                del self._num_of[program.tenant]
        if program.keys:
            self._by_leaf.pop(program.keys[-1], None)
        if program.parent is not None and program in program.parent.children:
            program.parent.children.remove(program)
        program.since_s = None
        self.num_ended += 1

    # Time

    def tick(self, now: float) -> list[Program]:
        """Returns the programs whose blocks should be evicted first from now on. They include those
        that have paused for longer than all ranges of ages, which are forgotten."""
        leaving: list[Program] = []
        for program in self._next_to_look_at():
            if program.since_s is None or program.num_running:
                continue
            if self.pauses.age(program, now):
                self._forget(program)
                leaving += [] if program.parked else [program]
            elif not program.parked:
                program.chance = self._chance(program, now)
                if program.chance < PARK_CHANCE and len(leaving) < MAX_PARKED_PER_TICK:
                    program.parked = True
                    leaving.append(program)
        return leaving

    def _next_to_look_at(self) -> list[Program]:
        """Returns all of them, or as many as a tick may look at, starting where the last tick
        ended."""
        programs = list(self._programs.values())
        if len(programs) <= MAX_LOOKS_PER_TICK:
            return programs
        start = self._looked_at % len(programs)
        self._looked_at = start + MAX_LOOKS_PER_TICK
        return (programs[start:] + programs[:start])[:MAX_LOOKS_PER_TICK]

    def _chance(self, program: Program, now: float) -> float:
        """The chance of the program's next call within the horizon."""
        if now < program.keep_until_s or program.awaits_children:
            return 1.0
        return self.pauses.chance(program, HORIZON_S, now)

    def held_tokens(self) -> dict[InstanceId | None, float]:
        """Tokens of KVCache that the programs which have begun need for themselves, by the instance
        where their blocks are (None: they have none yet). Programs that run count in full, the
        others by the chance that they need it soon. If most programs are still short, they count
        with the usual size, to which they will grow."""
        held: dict[InstanceId | None, float] = {}
        present: dict[InstanceId | None, float] = {}
        for program in self._programs.values():
            if program.has_begun and not program.parked:
                chance = 1.0 if program.num_running else program.chance
                at = program.instance
                held[at] = held.get(at, 0.0) + program.own_tokens * chance
                present[at] = present.get(at, 0.0) + chance
        usual = self.usual_tokens.value
        return {at: max(tokens, present[at] * usual) for at, tokens in held.items()}


MAX_QUEUE_S = 2.0
MAX_SHARE = 0.9
"""Share of the decode pool's KVCache that programs may need for themselves."""
UPDATE_EVERY_S = 0.25


class Door:
    """Decides which whole programs wait: a new one begins when there is room for it beside those
    that have begun. Reads the bookings, and changes none.

    A call of a program that has begun is never refused for the load: it waits, like a request that
    was admitted before. So the load is limited where programs begin. A new program waits

    * while the programs that have begun need the KVCache of the decode pool for themselves. Beyond
      that, each computes again what the others evicted, and all get slower;
    * while prompts wait longer than `MAX_QUEUE_S` on every instance, or all decode instances are
      slower than the TBT SLO: it would only share what the others get;
    * behind programs that came before it.

    A sub-agent belongs to its root, and begins with it. The calls of a program stay where its
    blocks are, unless another instance is predicted to answer sooner (Algorithm 1) and has room:
    without room, they would evict the blocks of others.
    """

    def __init__(self, programs: Programs, table: InstanceTable) -> None:
        self._programs, self._table = programs, table
        self._held: dict[InstanceId | None, float] = {}  # tokens, by instance
        self._updated_s = -inf
        self._outside: dict[str, dict[int, Program]] = {}  # new ones by tenant and number

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._outside.values())

    def why_wait(self, tracked: TrackedRequest, now: float) -> Rejection | None:
        """The reason why a call waits for its program, or None if it need not wait."""
        program = tracked.program
        if program is None or program.root.has_begun:
            return None
        why = self._why(tracked, now)
        if why is None:
            self.leave(program)
            return None
        self._outside.setdefault(program.tenant, {})[program.root.number] = program.root
        return Rejection(429, PROGRAMS_WAIT, f"programs that began before it go first: {why}", 0.0)

    def leave(self, program: Program) -> None:
        """Removes a program that has begun or ended."""
        waiting = self._outside.get(program.tenant, {})
        waiting.pop(program.root.number, None)
        if not waiting:
            self._outside.pop(program.tenant, None)

    def note_begun(self, program: Program, num_tokens: float) -> None:
        """Notes that a program has begun, and needs this many tokens more."""
        self.leave(program)
        at = program.instance
        self._held[at] = self._held.get(at, 0.0) + num_tokens

    def note_ended(self) -> None:
        """Notes that a program has ended: what it held is free."""
        self._updated_s = -inf

    def _held_now(self, now: float) -> dict[InstanceId | None, float]:
        if not 0.0 <= now - self._updated_s < UPDATE_EVERY_S:
            self._held, self._updated_s = self._programs.held_tokens(), now
        return self._held

    def crowded(self, tracked: TrackedRequest, now: float) -> list[int]:
        """Rows of instances that a call should not move to: programs need their KVCache. Its own
        instance is never among them."""
        program, table = tracked.program, self._table
        if program is None:
            return []
        own = max(tracked.request.num_prompt_tokens, self._programs.usual_tokens.value)
        held = self._held_now(now)
        return [
            row
            for row, instance_id in enumerate(table.ids)
            if instance_id != program.instance
            and held.get(instance_id, 0.0) + own > MAX_SHARE * table.capacity_tokens.item(row)
        ]

    def _why(self, tracked: TrackedRequest, now: float) -> str | None:
        table, program = self._table, tracked.program
        assert program is not None
        if not table.num_decodes or not table.num_prefills:
            return None  # another rule tells
        first = min(self._outside.get(program.tenant, ()), default=program.root.number)
        if first < program.root.number:
            return f"{len(self)} wait already"
        held = sum(self._held_now(now).values())
        capacity = float(table.capacity_tokens[table.decodes].sum())
        own = max(tracked.request.num_prompt_tokens, self._programs.usual_tokens.value)
        if held and held + own > MAX_SHARE * capacity:
            return f"they need {held:,.0f} of the {capacity:,.0f} tokens of KVCache"
        queue_s = table.queue_s(now)[table.prefills]
        least_s = float(queue_s.min(initial=inf))
        if least_s > MAX_QUEUE_S:
            return f"prompts wait {least_s:.1f} s on every instance"
        tbt_s = table.booked_tbt_s(tracked.request.num_prompt_tokens)[table.decodes]
        busy = table.booked_batch[table.decodes] > 0
        if bool(np.all(busy)) and float(tbt_s.min()) > tracked.request.slo.tbt_s:
            return f"answers take {float(tbt_s.min()):.3f} s a token on every instance"
        return None


class ProgramKeeper(ClusterObserver):
    """Applies the rules of programs to their calls: who waits, what is kept, and what leaves first.
    The life of a request calls nothing else here. Appends what is to be done to `actions`."""

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
        """Finds the program whose call it is, if it is one."""
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
        elif named is not None:  # no call of its parent came
            tracked.record.parent_program = named.parent_id
        tracked.explanation.add(_describe(program, now))
        if program.parked:
            program.parked = False
            self._mark(program, leaves_first=False)

    def why_wait(self, tracked: TrackedRequest, now: float) -> Rejection | None:
        """The reason why the call waits for its program, or None if it need not wait."""
        if tracked.program is None:
            return None
        why = self.door.why_wait(tracked, now)
        if why is None:
            tracked.crowded = self.door.crowded(tracked, now)
        return why

    def placed(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        program = tracked.program
        if program is not None:
            self.programs.place(tracked, planned.placement.hit_tokens, now)
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
        """Blocks of programs that pause for long leave first."""
        for program in self.programs.tick(now):
            self._mark(program, leaves_first=True)
        return ()

    def _mark(self, program: Program, leaves_first: bool) -> None:
        """Tells the instances that hold the program's own blocks whether these leave DRAM first.
        Blocks that others began with are not its own."""
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
            state = self._instances.get(self._table.ids[int(row)])
            if state is not None:
                there = own[: int(held.item(row)) - first]
                command = MarkReplicas(spare=there) if leaves_first else MarkReplicas(last=there)
                self._actions.append(Send(state.info.instance_id, command))


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
