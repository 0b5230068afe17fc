"""Whether the numbers of prefill and decode instances fit the load, and who should change sides.

Decides only: `role_switching` drains and switches.

What is measured is demand: the seconds of prefill and of decode that the requests of the last
minutes bring with them, rejected ones included, per second, if the instances did nothing else. It
does not change when an instance changes sides, as queues, batches and rejections do; so the loads
after a switch can be told beforehand, and a switch never looks like a reason for the next one.

* Prefill: the cost of what is not cached, by the instances' own cost model.
* Decode: an answer of L tokens in a context of c takes its own share of L steps, f L + g L c, and
  its part of what each step costs whoever is in it, e. The part is 1 / B of the largest batch B
  that keeps the promised time between tokens and fits the engine's memory.

Both are linear in sums over the requests, so that a few numbers tell the demand on any instance, of
whatever hardware and with whatever costs are believed of it by then. How long an answer will be is
learned by the length of its prompt: long documents get short answers, and it is their mix that
shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

import numpy as np

from moonpool.conductor.fleet import Fleet, Floats
from moonpool.conductor.output_length import OutputLengths
from moonpool.types import InstanceId, Role, Slo

NUM_FADES = 32
"""So many times in a window, what was offered before loses a part: 1 / NUM_FADES."""
MARGIN = 0.1
"""The fuller pool's load must fall at least by this share, once as many switched as should."""
PRESSED = 0.5
"""Below this load of the fuller pool, nobody gains from a switch."""
MIXED_SHARE = 0.5
"""Of a mixed instance, to either side."""
LIKE = 1.1
"""Instances are equally apt for the other side if their costs say so within 10 %."""
LEAST_ROOM = 0.1
"""Of a bare step: a promised time between tokens that leaves less for answers is no measure."""
LONGEST_FADE = 4096
TINY_S = 1e-12


class Pools(NamedTuple):
    """Load of both pools: demand over what the instances can do; 1 is all of it."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self)

    @property
    def short_of(self) -> Role:
        return Role.PREFILL if self.prefill > self.decode else Role.DECODE


class Advice(NamedTuple):
    """`instance_id` should become a `role` instance, the first of `num_switches`."""

    instance_id: InstanceId
    role: Role
    num_switches: int
    now: Pools
    then: Pools  # after all of them

    def describe(self, num_prefills: int, num_decodes: int) -> str:
        more = self.num_switches if self.role is Role.PREFILL else -self.num_switches
        return (
            f"{self.role} instances are short: {num_prefills}P+{num_decodes}D has loads"
            f" {self.now.prefill:.2f} and {self.now.decode:.2f},"
            f" {num_prefills + more}P+{num_decodes - more}D would have"
            f" {self.then.prefill:.2f} and {self.then.decode:.2f}"
        )


class Offered:
    """Sums over the requests of the last minutes, older ones fading. All that demand depends on."""

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / NUM_FADES
        self._step: int | None = None
        self.seen_s = 0.0  # time that the sums stand for; the window, in the end
        # Requests, new tokens, their squares, new x cached; answers' tokens, tokens x context.
        self._sums = np.zeros(6)

    def add(self, new_tokens: int, cached_tokens: int, answer_tokens: float, now: float) -> None:
        """One request (mutates)."""
        self.advance(now)
        context_tokens = new_tokens + cached_tokens + answer_tokens / 2
        self._sums += (
            1.0,
            new_tokens,
            new_tokens * new_tokens,
            new_tokens * cached_tokens,
            answer_tokens,
            answer_tokens * context_tokens,
        )

    def advance(self, now: float) -> None:
        """Lets time pass (mutates). By multiplications alone: every machine rounds those alike."""
        step = int(now / self._step_s)
        if self._step is None:
            self._step = step
        fade = 1.0 - 1.0 / NUM_FADES
        for _ in range(min(step - self._step, LONGEST_FADE)):
            self._sums *= fade
            self.seen_s = self.seen_s * fade + self._step_s
        self._step = step

    def prefill_s(self, fleet: Fleet) -> Floats:
        """By row: seconds of prefill per second, if it had to do all of it."""
        number, new, squares, products, _, _ = self._sums.tolist()
        work_s: Floats = fleet.a * number + fleet.b * new + fleet.c * squares + fleet.d * products
        return work_s / max(self.seen_s, TINY_S)

    def decode_s(self, fleet: Fleet, tbt_s: float, memory_share: float) -> Floats:
        """By row: seconds of decode per second, if it had to do all of it, in batches as large as
        promise and memory allow."""
        tokens, contexts = self._sums[4:].tolist()
        own_s = fleet.f * tokens + fleet.g * contexts
        room_s = np.maximum(tbt_s - fleet.e, LEAST_ROOM * fleet.e + TINY_S)
        limit_tokens = np.minimum(fleet.engine_tokens, np.maximum(fleet.capacity_tokens, 1.0))
        in_memory = contexts / (limit_tokens * memory_share)
        work_s: Floats = own_s + fleet.e * np.maximum(own_s / room_s, in_memory)
        return work_s / max(self.seen_s, TINY_S)


class RoleBalance:
    """Remembers what was offered, and for how long the ratio has not fitted."""

    def __init__(self, window_s: float, slo: Slo, load_limit: float = 1.0) -> None:
        """`load_limit`: so much of what was promised, and of the memory, may be used."""
        self._window_s = window_s
        self._tbt_s = slo.tbt_s * load_limit
        self._load_limit = load_limit
        self._offered = Offered(window_s)
        self._lengths = OutputLengths()
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0
        self._rest_until_s = 0.0

    def note_arrival(
        self, num_tokens: int, cached_tokens: int, max_answer_tokens: int, now: float
    ) -> None:
        """A request, whatever becomes of it. Of its answer, the first token is the prefill's."""
        answer_tokens = 0.0
        if max_answer_tokens > 1:
            usual = self._lengths.predict(num_tokens, (), 0)
            answer_tokens = min(float(max_answer_tokens), usual) - 1.0
        cached_tokens = min(cached_tokens, num_tokens)
        self._offered.add(num_tokens - cached_tokens, cached_tokens, max(answer_tokens, 0.0), now)

    def note_answer(self, num_prompt_tokens: int, num_generated: int) -> None:
        """A complete one."""
        self._lengths.learn(num_prompt_tokens, (), num_generated, num_generated)

    def rest(self, now: float) -> None:
        """An instance has just switched, or could not: no other for a while."""
        self._rest_until_s = now + self._window_s / 4

    def loads(self, fleet: Fleet, now: float) -> Pools:
        self._offered.advance(now)
        return self._scales(fleet).loads()

    def advise(self, fleet: Fleet, losses: Sequence[tuple[int, int]], now: float) -> Advice | None:
        """What should be done, if that has been so for half a window. `losses`: by row, what is
        under way and what is cached there; who has least goes first."""
        advice = self.judge(fleet, losses, now)
        wanted = None if advice is None else advice.role
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        lasts = now - self._wanted_since_s >= self._window_s / 2
        return advice if lasts else None

    def may_switch(self, now: float) -> bool:
        return now >= self._rest_until_s

    def judge(self, fleet: Fleet, losses: Sequence[tuple[int, int]], now: float) -> Advice | None:
        """The same, as of this moment."""
        self._offered.advance(now)
        if self._offered.seen_s < self._window_s / 4:
            return None
        scales = self._scales(fleet)
        before = scales.loads()
        if before.worst < PRESSED:
            return None
        role = before.short_of
        rows = scales.donors(role, losses)
        best, best_number = before, 0
        for number, row in enumerate(rows, start=1):
            scales.move(row, role)
            after = scales.loads()
            if after.worst >= best.worst:
                break
            best, best_number = after, number
            if after.worst < PRESSED:
                break
        if not best_number or best.worst > (1.0 - MARGIN) * before.worst:
            return None
        return Advice(fleet.ids[rows[0]], role, best_number, before, best)

    def _scales(self, fleet: Fleet) -> _Scales:
        offered = self._offered
        decode_s = offered.decode_s(fleet, self._tbt_s / fleet.tbt_tail, self._load_limit)
        return _Scales(fleet, offered.prefill_s(fleet), decode_s)


class _Scales:
    """Both pools as sums of what their instances can do: the inverse of the time that each would
    take alone."""

    def __init__(self, fleet: Fleet, prefill_s: Floats, decode_s: Floats) -> None:
        self._fleet = fleet
        self._prefills, self._decodes = fleet.prefills.tolist(), fleet.decodes.tolist()
        self._prefill_s: list[float] = np.maximum(prefill_s, TINY_S).tolist()
        self._decode_s: list[float] = np.maximum(decode_s, TINY_S).tolist()
        self._can_prefill = self._sum(self._prefills, self._prefill_s)
        self._can_decode = self._sum(self._decodes, self._decode_s)

    def _sum(self, members: list[bool], work_s: list[float]) -> float:
        return fsum(
            (MIXED_SHARE if self._prefills[row] and self._decodes[row] else 1.0) / work_s[row]
            for row, is_member in enumerate(members)
            if is_member
        )

    def loads(self) -> Pools:
        return Pools(
            1.0 / self._can_prefill if self._can_prefill > 0 else float("inf"),
            1.0 / self._can_decode if self._can_decode > 0 else float("inf"),
        )

    def move(self, row: int, role: Role) -> None:
        """To that side (mutates)."""
        sign = 1.0 if role is Role.PREFILL else -1.0
        self._can_prefill += sign / self._prefill_s[row]
        self._can_decode -= sign / self._decode_s[row]

    def donors(self, role: Role, losses: Sequence[tuple[int, int]]) -> list[int]:
        """Who could change to this side, best first: whose costs speak most for it, then who has
        least to lose. One stays behind, and whoever alone takes the longest requests."""
        mine, theirs = self._prefills, self._decodes
        if role is Role.PREFILL:
            mine, theirs = theirs, mine
        side = [row for row, is_member in enumerate(mine) if is_member]
        rows = [row for row in side if not theirs[row]]
        num_spare = len(rows) - 1
        capacities = self._fleet.capacity_tokens
        largest = max(map(capacities.item, side), default=0.0)
        large = [row for row in side if capacities.item(row) == largest]
        if len(large) == 1:
            rows = [row for row in rows if row != large[0]]
        return self._ranked(rows, role, losses)[: max(num_spare, 0)]

    def _ranked(self, rows: list[int], role: Role, losses: Sequence[tuple[int, int]]) -> list[int]:
        if not rows:
            return []

        there_s, here_s = self._prefill_s, self._decode_s
        if role is Role.DECODE:
            there_s, here_s = here_s, there_s

        def cost(row: int) -> float:
            return there_s[row] / here_s[row]

        limit = LIKE * min(map(cost, rows))
        like = sorted((row for row in rows if cost(row) <= limit), key=lambda r: (*losses[r], r))
        others = sorted((row for row in rows if cost(row) > limit), key=lambda r: (cost(r), r))
        return [*like, *others]
