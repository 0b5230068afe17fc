"""Whether the ratio of prefill to decode instances fits the load, and which instance should switch.

Decides only: `role_switching` drains and switches.

The measure is demand: the seconds of prefill and of decode per second that the requests of the last
minutes need, rejected requests included. Demand does not depend on the roles of instances, as
queues, batches and rejections do. So the loads after a switch can be predicted, and a switch never
looks like a reason for the next one.

* Prefill: the cost of the tokens that are not cached, by the instances' own cost model.
* Decode: an answer of L tokens in a context of c takes f L + g L c of its own (f per sequence and
  g per context token), and a part of the base time e of each step. The part is 1 / B of the largest
  batch B that meets the TBT SLO and fits the engine's memory.

Both are linear in sums over the requests, so a few numbers yield the demand on any instance, for
any hardware and any present cost estimate.

Demand is summed over two windows. In the long one, a ratio that does not fit counts when it has
lasted for half of the window. The short one finds a shift at once: the ratio must not fit even if
the pool that is short had SURE standard errors less demand, and the other pool as many more. After
such a shift the long window forgets what was before.

The length of an answer is predicted from the length of
its prompt: long documents get short answers, and it is their mix that shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import NamedTuple

import numpy as np

from moonpool.conductor.estimators import OutputLengths
from moonpool.conductor.instance_table import Floats, InstanceTable
from moonpool.types import InstanceId, Role, Slo

NUM_FADES = 32
"""Times per window that the earlier demand is reduced by 1 / NUM_FADES."""
MARGIN = 0.1
"""Least share by which the advised switches must reduce the load of the fuller pool."""
LOADED = 0.5
"""Below this load of the fuller pool, a switch has no benefit."""
MIXED_SHARE = 0.5
"""Share of a mixed instance that counts for each pool."""
EQUAL_COST = 1.1
"""Instances are equally suitable for the other role if their costs differ by at most 10 %."""
MIN_DECODE_SHARE = 0.1
"""Least room for decodes in a step, as a share of its base time, if the TBT SLO leaves less."""
SHORT_WINDOW_S = 30.0
"""The short window, at most half of the long one."""
SHORT_LASTS = 0.4
"""Share of the short window for which its advice must last."""
SURE = 2.5
LONGEST_FADE = 4096
TINY_S = 1e-12


class Pools(NamedTuple):
    """Load of both pools: demand over capacity."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self)

    @property
    def short_of(self) -> Role:
        return Role.PREFILL if self.prefill > self.decode else Role.DECODE


ONE = Pools(1.0, 1.0)


class RoleAdvice(NamedTuple):
    """These instances should become `role` instances."""

    instance_ids: tuple[InstanceId, ...]
    role: Role
    now: Pools
    then: Pools  # after all switches

    @property
    def num_switches(self) -> int:
        return len(self.instance_ids)

    def describe(self, num_prefills: int, num_decodes: int) -> str:
        more = self.num_switches if self.role is Role.PREFILL else -self.num_switches
        return (
            f"{self.role} instances are short: {num_prefills}P+{num_decodes}D has loads"
            f" {self.now.prefill:.2f} and {self.now.decode:.2f},"
            f" {num_prefills + more}P+{num_decodes - more}D would have"
            f" {self.then.prefill:.2f} and {self.then.decode:.2f}"
        )


class OfferedLoad:
    """Sums over the requests of the last minutes, from which demand follows. Older ones fade."""

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / NUM_FADES
        self._step: int | None = None
        self.seen_s = 0.0  # time that the sums stand for; grows to the window
        # Requests, new tokens, their squares, new x cached; answers' tokens, tokens x context,
        # squares of answers' tokens.
        self._sums = [0.0] * 7

    def add(self, new_tokens: int, cached_tokens: int, answer_tokens: float, now: float) -> None:
        """Adds a request (mutates)."""
        self.advance(now)
        context_tokens = new_tokens + cached_tokens + answer_tokens / 2
        added = (
            1.0,
            new_tokens,
            new_tokens * new_tokens,
            new_tokens * cached_tokens,
            answer_tokens,
            answer_tokens * context_tokens,
            answer_tokens * answer_tokens,
        )
        self._sums = [before + more for before, more in zip(self._sums, added, strict=True)]

    def adopt(self, other: OfferedLoad) -> None:
        """Takes the sums and the time of a shorter window (mutates)."""
        self._sums, self.seen_s = list(other._sums), other.seen_s

    def errors(self) -> Pools:
        """Relative standard errors of both demands, of requests that come by chance."""
        _, new, new_squares, _, answers, _, answer_squares = self._sums
        return Pools(
            sqrt(new_squares) / max(new, TINY_S), sqrt(answer_squares) / max(answers, TINY_S)
        )

    def advance(self, now: float) -> None:
        """Fades the sums (mutates). Multiplies only, because every machine rounds that alike."""
        step = int(now / self._step_s)
        if self._step is None:
            self._step = step
        fade = 1.0 - 1.0 / NUM_FADES
        for _ in range(min(step - self._step, LONGEST_FADE)):
            self._sums = [each * fade for each in self._sums]
            self.seen_s = self.seen_s * fade + self._step_s
        self._step = step

    def prefill_s(self, table: InstanceTable) -> Floats:
        """Seconds of prefill per second if the instance did all of it, by row."""
        number, new, squares, products = self._sums[:4]
        work_s: Floats = (
            table.prefill_base_s * number
            + table.prefill_s_per_token * new
            + table.prefill_s_per_token_squared * squares
            + table.prefill_s_per_new_x_cached * products
        )
        return work_s / max(self.seen_s, TINY_S)

    def decode_s(self, table: InstanceTable, tbt_s: float, memory_share: float) -> Floats:
        """Seconds of decode per second if the instance did all of it, by row. Batches are as large
        as SLO and memory allow."""
        tokens, contexts = self._sums[4:6]
        own_s = table.decode_s_per_sequence * tokens + table.decode_s_per_context_token * contexts
        least_s = MIN_DECODE_SHARE * table.decode_base_s + TINY_S
        room_s = np.maximum(tbt_s - table.decode_base_s, least_s)
        limit_tokens = np.minimum(table.engine_tokens, np.maximum(table.capacity_tokens, 1.0))
        in_memory = contexts / (limit_tokens * memory_share)
        work_s: Floats = own_s + table.decode_base_s * np.maximum(own_s / room_s, in_memory)
        return work_s / max(self.seen_s, TINY_S)


class RoleBalance:
    """Tracks the demand, and for how long the ratio has not fitted it."""

    def __init__(self, window_s: float, slo: Slo, load_limit: float = 1.0) -> None:
        """`load_limit`: share of the SLO and of the memory that may be used."""
        self._window_s = window_s
        self._tbt_s = slo.tbt_s * load_limit
        self._load_limit = load_limit
        self._short_s = min(SHORT_WINDOW_S, window_s / 2)
        self._offered = OfferedLoad(window_s)
        self._lately = OfferedLoad(self._short_s)
        self._lengths = OutputLengths()
        self._lasting = _Lasting(window_s / 2)
        self._lasting_lately = _Lasting(SHORT_LASTS * self._short_s)
        self._paused_until_s = 0.0

    def note_arrival(
        self, num_tokens: int, cached_tokens: int, max_answer_tokens: int, now: float
    ) -> None:
        """Adds an arrived request, served or not. The prefill produces the first token of its
        answer."""
        answer_tokens = 0.0
        if max_answer_tokens > 1:
            expected = self._lengths.predict(num_tokens, (), 0)
            answer_tokens = min(float(max_answer_tokens), expected) - 1.0
        cached_tokens = min(cached_tokens, num_tokens)
        for offered in (self._offered, self._lately):
            offered.add(num_tokens - cached_tokens, cached_tokens, max(answer_tokens, 0.0), now)

    def note_answer(self, num_prompt_tokens: int, num_generated: int) -> None:
        """Learns from a complete answer."""
        self._lengths.learn(num_prompt_tokens, (), num_generated, num_generated)

    def pause(self, now: float) -> None:
        """Pauses switching after an instance has failed to switch."""
        self._paused_until_s = now + self._window_s / 4

    def loads(self, table: InstanceTable, now: float) -> Pools:
        self._offered.advance(now)
        return self._capacities(table, self._offered).loads()

    def demand(self, table: InstanceTable, now: float) -> Pools | None:
        """Demand in instances that would always be busy, of the window in which it is higher. None
        before enough has been seen; infinite for a pool without instances."""
        self._offered.advance(now)
        self._lately.advance(now)
        if self._offered.seen_s < self._short_s / 2:
            return None
        long, short = (
            self._capacities(table, each).loads() for each in (self._offered, self._lately)
        )
        return Pools(
            max(long.prefill, short.prefill) * table.num_prefills,
            max(long.decode, short.decode) * table.num_decodes,
        )

    def advise(
        self, table: InstanceTable, losses: Sequence[tuple[int, int]], now: float
    ) -> RoleAdvice | None:
        """The advice, if it has lasted. `losses`: attempts under way and blocks cached, by row; the
        instances that lose least switch first."""
        sure = self._judge_lately(table, losses, now)
        if self._lasting_lately.lasts(None if sure is None else sure.role, now):
            self._offered.adopt(self._lately)
            return sure
        advice = self.judge(table, losses, now)
        return advice if self._lasting.lasts(None if advice is None else advice.role, now) else None

    def may_switch(self, now: float) -> bool:
        return now >= self._paused_until_s

    def judge(
        self, table: InstanceTable, losses: Sequence[tuple[int, int]], now: float
    ) -> RoleAdvice | None:
        """The advice by the long window at this moment."""
        self._offered.advance(now)
        if self._offered.seen_s < self._window_s / 4:
            return None
        return _judge(self._capacities(table, self._offered), table, losses)

    def _judge_lately(
        self, table: InstanceTable, losses: Sequence[tuple[int, int]], now: float
    ) -> RoleAdvice | None:
        """The advice by the short window, if it also holds within the errors."""
        lately = self._lately
        lately.advance(now)
        if lately.seen_s < self._short_s / 2:
            return None
        role = self._capacities(table, lately).loads().short_of
        signs = (-SURE, SURE) if role is Role.PREFILL else (SURE, -SURE)
        errors = lately.errors()
        factors = Pools(*(max(1.0 + n * e, 0.0) for n, e in zip(signs, errors, strict=True)))
        advice = _judge(self._capacities(table, lately, factors), table, losses)
        return advice if advice is not None and advice.role is role else None

    def _capacities(
        self, table: InstanceTable, offered: OfferedLoad, factors: Pools = ONE
    ) -> _PoolCapacities:
        decode_s = offered.decode_s(table, self._tbt_s / table.tbt_tail, self._load_limit)
        prefill_s = offered.prefill_s(table)
        return _PoolCapacities(table, prefill_s * factors.prefill, decode_s * factors.decode)


class _Lasting:
    """For how long an advised role has been the same."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._role: Role | None = None
        self._since_s = 0.0

    def lasts(self, role: Role | None, now: float) -> bool:
        """Whether this role has been advised for long enough (mutates)."""
        if role is not self._role:
            self._role, self._since_s = role, now
        return role is not None and now - self._since_s >= self._least_s


def _judge(
    capacities: _PoolCapacities, table: InstanceTable, losses: Sequence[tuple[int, int]]
) -> RoleAdvice | None:
    """Switches for as long as each one reduces the load of the fuller pool (mutates)."""
    before = capacities.loads()
    if before.worst < LOADED:
        return None
    role = before.short_of
    rows = capacities.donors(role, losses)
    best, best_number = before, 0
    for number, row in enumerate(rows, start=1):
        capacities.move(row, role)
        after = capacities.loads()
        if after.worst >= best.worst:
            break
        best, best_number = after, number
        if after.worst < LOADED:
            break
    if not best_number or best.worst > (1.0 - MARGIN) * before.worst:
        return None
    return RoleAdvice(tuple(table.ids[row] for row in rows[:best_number]), role, before, best)


class _PoolCapacities:
    """Capacities of both pools: sums over the instances of the inverse of the time that each
    would take alone."""

    def __init__(self, table: InstanceTable, prefill_s: Floats, decode_s: Floats) -> None:
        self._table = table
        self._prefills, self._decodes = table.prefills.tolist(), table.decodes.tolist()
        self._prefill_s: list[float] = np.maximum(prefill_s, TINY_S).tolist()
        self._decode_s: list[float] = np.maximum(decode_s, TINY_S).tolist()
        self._prefill_capacity = self._sum(self._prefills, self._prefill_s)
        self._decode_capacity = self._sum(self._decodes, self._decode_s)

    def _sum(self, members: list[bool], work_s: list[float]) -> float:
        return fsum(
            (MIXED_SHARE if self._prefills[row] and self._decodes[row] else 1.0) / work_s[row]
            for row, is_member in enumerate(members)
            if is_member
        )

    def loads(self) -> Pools:
        return Pools(
            1.0 / self._prefill_capacity if self._prefill_capacity > 0 else float("inf"),
            1.0 / self._decode_capacity if self._decode_capacity > 0 else float("inf"),
        )

    def move(self, row: int, role: Role) -> None:
        """Moves an instance to the pool of this role (mutates)."""
        sign = 1.0 if role is Role.PREFILL else -1.0
        self._prefill_capacity += sign / self._prefill_s[row]
        self._decode_capacity -= sign / self._decode_s[row]

    def donors(self, role: Role, losses: Sequence[tuple[int, int]]) -> list[int]:
        """Rows that could switch to this role, best first: by the ratio of their costs, then by
        what they lose. One instance must remain, and so must a single one with the most room."""
        own, other = self._prefills, self._decodes
        if role is Role.PREFILL:
            own, other = other, own
        pool = [row for row, is_member in enumerate(own) if is_member]
        rows = [row for row in pool if not other[row]]
        num_spare = len(rows) - 1
        capacities = self._table.capacity_tokens
        largest = max(map(capacities.item, pool), default=0.0)
        large = [row for row in pool if capacities.item(row) == largest]
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

        limit = EQUAL_COST * min(map(cost, rows))
        equal = sorted((row for row in rows if cost(row) <= limit), key=lambda r: (*losses[r], r))
        others = sorted((row for row in rows if cost(row) > limit), key=lambda r: (cost(r), r))
        return [*equal, *others]
