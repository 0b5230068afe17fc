"""The programs that are under way: their calls, their KVCache, and when their next calls are due.

The identity of a program is what its client says (`ProgramContext`); programs of different tenants
are never the same. With `programs="all"`, a prompt that goes on after an earlier one is a call of
the same program, too (`recognise`).

A program's blocks are kept through a pause as long as the learned length of the pause makes them
worth their room. The worth of a program's own blocks is the chance that its next call comes before
the room would serve others, `HORIZON_S`. Below `PARK_CHANCE` the program is *parked*: its blocks
are the first to leave DRAM, for the SSD if there is one, and `placement.prefetching` brings them
back before the next call is due. A parked program no longer counts where new ones wait (`Door`). A
program ends when its client says so, after a pause longer than all ranges of ages, or as one too
many (`MAX_PROGRAMS`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.conductor.programs.pauses import Pauses
from moonpool.conductor.programs.program import Program
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting.queue import WaitingRequests
from moonpool.types import LEAD, BlockKey, InstanceId, ProgramContext, payer_of

MAX_PROGRAMS = 4096
"""The most programs that are remembered. When there is one more, the tenant with the most programs
loses the paused program whose last call came first."""
HORIZON_S = 30.0
"""If a pause should be shorter than this, the blocks stay in place."""
PARK_CHANCE = 0.1
MAX_PARKED_PER_TICK = 64
MAX_LOOKS_PER_TICK = 256
"""The most programs that one tick examines, in turns, so that a client that invents names costs no
more."""
MAX_DEPTH = 16
"""Most programs above a sub-agent; a deeper one counts as a child of its grandparent."""

Key = tuple[str, str]
"""A program's key is the tenant and the program's id."""


class Programs:
    """All programs that have begun or wait to, and have not ended."""

    def __init__(self, waiting: WaitingRequests) -> None:
        """`waiting` assigns the places in the order of waiting requests."""
        self.pauses = Pauses()
        self.num_ended = 0
        # mean tokens that a program needs for itself after a call
        self.usual_tokens = RunningMean(0.0)
        # all programs, ordered by the arrival of their last call
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._num_of: Counter[str] = Counter()  # by tenant
        # recognised programs, by the last key of their prompt
        self._by_leaf: dict[BlockKey, Program] = {}
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
        program = self._named(payer_of(tracked.request.tenant), context)
        self.pauses.end(program, now)
        program.num_running += 1
        program.num_calls += 1
        program.chance = 1.0
        if context.keep_s is not None:
            program.keep_until_s = now + context.keep_s
        return program

    def recognise(self, tracked: TrackedRequest, now: float) -> Program | None:
        """Finds the program of an unnamed request by its blocks: the program whose last prompt it
        continues, or else a new one."""
        tenant = payer_of(tracked.request.tenant)
        for key in reversed(tracked.keys):
            program = self._by_leaf.get(key)
            # Tenants may share their blocks (`types.paying`), but not their programs.
            if program is not None and not program.num_running and program.tenant == tenant:
                break
        else:
            program = self._new(tenant, f"~{self._num_recognised}")
            self._num_recognised += 1
            program.is_named = False
        self._programs.move_to_end((program.tenant, program.program_id))
        self.pauses.end(program, now)
        program.num_running += 1
        program.num_calls += 1
        program.chance = 1.0
        return program

    def _named(self, tenant: str, context: ProgramContext) -> Program:
        program = self._programs.get((tenant, context.program_id))
        if program is None:
            parent = self._parent_of(tenant, context)
            program = self._new(tenant, context.program_id, parent)
            program.blocks_parent = context.blocks_parent
        self._programs.move_to_end((tenant, program.program_id))
        program.kind = context.kind or program.kind
        return program

    def _parent_of(self, tenant: str, context: ProgramContext) -> Program | None:
        """Returns the program that started this one, if that program has begun on this cluster. The
        parent may be named by its task."""
        named = context.parent_id or context.root_id
        task = named.removesuffix(f":{LEAD}")
        for parent_id in (named, task if task != named else f"{task}:{LEAD}"):
            parent = self._programs.get((tenant, parent_id))
            if parent_id and parent_id != context.program_id and parent is not None:
                return parent
        return None

    def _new(self, tenant: str, program_id: str, parent: Program | None = None) -> Program:
        depth, above = 0, parent
        while above is not None and depth <= MAX_DEPTH:
            depth, above = depth + 1, above.parent
        if depth > MAX_DEPTH and parent is not None:
            parent = parent.parent
        line = self._waiting.line if parent is None else parent.root.line
        self._num_programs += 1
        program = Program(program_id, tenant, line, self._num_programs, parent)
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

    def place(self, tracked: TrackedRequest, hit_tokens: int) -> None:
        """Notes that an attempt of a call is booked. `hit_tokens` of the prompt are cached where it
        is prefilled."""
        program, attempt = tracked.program, tracked.attempt
        assert program is not None and attempt is not None
        if not program.context_tokens:
            program.shared_tokens = hit_tokens
        program.context_tokens = max(program.context_tokens, tracked.request.num_prompt_tokens)
        program.has_begun = program.root.has_begun = True
        program.instance = attempt.decoder

    def end_call(self, tracked: TrackedRequest, answered: bool, now: float) -> Program | None:
        """Notes that a call has ended. Returns its program if the program has ended, too."""
        program = tracked.program
        if program is None:
            return None
        program.num_running -= 1
        record, context = tracked.record, tracked.request.program
        if answered:
            size = record.num_prompt_tokens + record.answer_tokens
            program.context_tokens = size
            self.usual_tokens.add(program.own_tokens)
            self._forget_leaf(program)
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
        self._forget_leaf(program)
        if program.parent is not None and program in program.parent.children:
            program.parent.children.remove(program)
        program.since_s = None
        self.num_ended += 1

    def _forget_leaf(self, program: Program) -> None:
        if program.keys and self._by_leaf.get(program.keys[-1]) is program:
            del self._by_leaf[program.keys[-1]]

    # Time

    def tick(self, now: float) -> list[Program]:
        """Returns the programs whose blocks should be evicted first from now on. The result
        includes programs that have paused for longer than all ranges of ages; these are
        forgotten."""
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
        """Returns all programs, or as many as a tick may look at, starting where the last tick
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
        """Returns the tokens of KVCache that the programs which have begun need for themselves, by
        the instance where their blocks are (None for programs without blocks so far). Programs that
        run count in full, paused programs by the chance that they need their blocks soon. While
        most programs are still short, each of them counts with the size to which it will probably
        grow."""
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
