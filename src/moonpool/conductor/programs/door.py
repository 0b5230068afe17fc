"""Decides which whole programs wait: a new one begins when there is room for it beside those that
have begun.

A call of a program that has begun is never refused for the load: it waits, like a request that was
admitted before. So the load is limited where programs begin. A new program waits

* while the programs that have begun need the KVCache of the decode pool for themselves. With more
  programs, each one computes again what the others evicted, and all get slower;
* while prompts wait longer than `MAX_QUEUE_S` on every instance, or all decode instances are slower
  than the TBT SLO: one more program would only slow down the running ones;
* behind programs of its tenant that came before it.

A sub-agent belongs to its root, and begins with it.

The calls of a program stay on the instance with its blocks, unless another instance is predicted to
answer sooner (Algorithm 1) and has room for them, so that they evict no blocks of other programs.
"""

from __future__ import annotations

from math import inf

import numpy as np

from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.placement.choice import PROGRAMS_WAIT, Rejection
from moonpool.conductor.programs.program import Program
from moonpool.conductor.programs.programs import Programs
from moonpool.conductor.state import TrackedRequest
from moonpool.types import InstanceId

MAX_QUEUE_S = 2.0
MAX_SHARE = 0.9
"""Share of the decode pool's KVCache that programs may need for themselves."""
UPDATE_EVERY_S = 0.25


class Door:
    """Decides which programs wait; reads the bookings and changes none."""

    def __init__(self, programs: Programs, table: InstanceTable) -> None:
        self._programs, self._table = programs, table
        # tokens that programs hold at each instance
        self._held: dict[InstanceId | None, float] = {}
        self._updated_s = -inf
        # programs that have not begun, by tenant and number
        self._outside: dict[str, dict[int, Program]] = {}

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
        """Notes that a program has ended, so that the KVCache that it held is free."""
        self._updated_s = -inf

    def _held_now(self, now: float) -> dict[InstanceId | None, float]:
        if not 0.0 <= now - self._updated_s < UPDATE_EVERY_S:
            self._held, self._updated_s = self._programs.held_tokens(), now
        return self._held

    def crowded(self, tracked: TrackedRequest, now: float) -> list[int]:
        """Returns the rows of instances that a call should not move to, because programs need their
        KVCache. The instance where the call's program already is is never among these rows."""
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
            return None  # another rule gives the reason of the wait
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
