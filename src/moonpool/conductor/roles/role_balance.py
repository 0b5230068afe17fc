"""Decides whether the ratio of prefill to decode instances fits the load, and which instance should
switch.

Changes no role: `role_switching` drains and switches.

The measure is demand: the seconds of prefill and of decode per second that the requests of the last
minutes need, rejected requests included. Demand does not depend on the roles of instances, as
queues, batches and rejections do. So the loads after a switch can be predicted, and a switch never
looks like a reason for the next one.

* Prefill: the cost of the tokens that are not cached, by the cost models of the instances.
* Decode: an answer of L tokens in a context of c takes f L + g L c of its own (f per sequence and
  g per context token), and a part of the base time e of each step. The part is 1 / B of the largest
  batch B that meets the TBT SLO and fits the engine's memory.

Both demands are linear in sums over the requests. So a few sums yield the demand for any hardware
and any cost estimate.

Demand is that of the requests since the mix last changed (`PresentLoad`), of at most a window.
Advice must also hold if the ratio of both demands is wrong by SURE standard errors. A switch back
needs a larger benefit. If the mix has not changed since the last switch, a switch needs more
certainty, and a second one within RETURN_S an even larger benefit. So roles do not swing between
two splits that are about equally good.

The length of an answer is predicted from the length of its prompt, and from whether a part of the
prompt is cached: long documents get short answers, the next turn of a long conversation does not,
and the mix of both shifts. Answers under way count (`RunningLengths`). Sums are kept by kind, and
take the lengths that are known when they are used: what is learned later also corrects earlier
requests, and does not look like a shift. Advice must also hold if the answers that exceed all known
lengths end at once (or last long, if prefill is short).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import fsum, inf, sqrt
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from moonpool.conductor.instance_table import Floats, InstanceTable
from moonpool.conductor.roles.running_lengths import NUM_KINDS, LengthRange, RunningLengths, kind_of
from moonpool.conductor.roles.served_share import Needs, RecentRequest, RecentRequests
from moonpool.types import InstanceId, Role, Slo

NUM_FADES = 32
"""How many times per window the earlier demand is reduced by 1 / NUM_FADES."""
MARGIN = 0.1
"""Least share by which the advised switches must reduce the load of the fuller pool."""
LOADED = 0.5
"""Below this load of the fuller pool, a switch has no benefit."""
MIXED_SHARE = 0.5
"""Share of a mixed instance that counts for each of the two pools."""
EQUAL_COST = 1.1
"""Instances are equally suitable for the other role if their costs differ by at most 10 %."""
MIN_DECODE_SHARE = 0.1
"""Least room for decodes in a step, as a share of its base time, if the TBT SLO leaves less."""
SHORT_WINDOW_S = 30.0
"""Length of the short window; it is at most half of the long one."""
PART_S = 2.0
"""Length of each part of the present load; the window has at least `LEAST_PARTS` and at most
`MOST_PARTS` of them."""
LEAST_PARTS, MOST_PARTS = 32, 256
LEAST_SEEN_S = 20.0
"""Time since a change before which nothing is advised: a burst is not a shift."""
LEAST_CHANGED = 5
"""Least number of parts before a change, and after it."""
CHANGED = 4.5
"""Standard errors by which the demand of the last seconds must differ from the demand before."""
SURE = 1.0
"""Advice must hold if the ratio of both demands is wrong by this many standard errors."""
SURE_TO_RETURN = 3.0
MARGIN_TO_RETURN, MARGIN_TO_RETURN_AGAIN = 0.2, 0.35
RETURN_S = 600.0
"""Time after a switch back in which another one without a change of the mix needs
`MARGIN_TO_RETURN_AGAIN`."""
SURE_MARGIN = 0.02
LONGEST_FADE = 4096
TINY_S = 1e-12


class Pools(NamedTuple):
    """Load of the prefill and the decode pool: demand over capacity."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self)

    @property
    def short_of(self) -> Role:
        return Role.PREFILL if self.prefill > self.decode else Role.DECODE


ONE = Pools(1.0, 1.0)
NO_NEEDS = Needs(np.zeros(0), np.zeros(0))
_LEAST, _MOST = attrgetter("least"), attrgetter("most")


class RoleAdvice(NamedTuple):
    """Advice that these instances should change to the role `role`."""

    instance_ids: tuple[InstanceId, ...]
    role: Role
    now: Pools
    then: Pools  # the predicted loads after all switches

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


class LoadSums:
    """Sums over requests, from which their demand for prefill and decode follows."""

    def __init__(self) -> None:
        self.seen_s = 0.0  # the length of the time that the sums stand for
        # Requests, new tokens, their squares, new x cached; answers' tokens, tokens x context,
        # squares of answers' tokens.
        self.sums = [0.0] * 7

    def add(self, new_tokens: int, cached_tokens: int, answer_tokens: float) -> None:
        """Adds a request to the sums."""
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
        self.sums = [before + more for before, more in zip(self.sums, added, strict=True)]

    def errors(self) -> Pools:
        """Relative standard errors of both demands, of requests that come by chance."""
        _, new, new_squares, _, answers, _, answer_squares = self.sums
        return Pools(
            sqrt(new_squares) / max(new, TINY_S), sqrt(answer_squares) / max(answers, TINY_S)
        )

    def prefill_s(self, table: InstanceTable) -> Floats:
        """Returns the seconds of prefill per second if the instance of each row did all prefill."""
        number, new, squares, products = self.sums[:4]
        work_s: Floats = (
            table.prefill_base_s * number
            + table.prefill_s_per_token * new
            + table.prefill_s_per_token_squared * squares
            + table.prefill_s_per_new_x_cached * products
        )
        return work_s / max(self.seen_s, TINY_S)

    def decode_s(self, table: InstanceTable, tbt_s: float, memory_share: float) -> Floats:
        """Returns the seconds of decode per second if the instance of each row did all decode.
        Assumes batches as large as the SLO and the memory allow."""
        tokens, contexts = self.sums[4:6]
        own_s = table.decode_s_per_sequence * tokens + table.decode_s_per_context_token * contexts
        least_s = MIN_DECODE_SHARE * table.decode_base_s + TINY_S
        room_s = np.maximum(tbt_s - table.decode_base_s, least_s)
        limit_tokens = np.minimum(table.engine_tokens, np.maximum(table.capacity_tokens, 1.0))
        in_memory = contexts / (limit_tokens * memory_share)
        work_s: Floats = own_s + table.decode_base_s * np.maximum(own_s / room_s, in_memory)
        return work_s / max(self.seen_s, TINY_S)


class OfferedLoad:
    """The requests of the last minutes. Older requests lose weight over time."""

    def __init__(self, window_s: float) -> None:
        self.load = LoadSums()
        self._step_s = window_s / NUM_FADES
        self._step: int | None = None

    def add(self, new_tokens: int, cached_tokens: int, answer_tokens: float, now: float) -> None:
        """Adds a request to the sums."""
        self.advance(now)
        self.load.add(new_tokens, cached_tokens, answer_tokens)

    def advance(self, now: float) -> None:
        """Fades the sums. Uses multiplications only, because every machine rounds these alike."""
        step = int(now / self._step_s)
        if self._step is None:
            self._step = step
        fade, load = 1.0 - 1.0 / NUM_FADES, self.load
        for _ in range(min(step - self._step, LONGEST_FADE)):
            load.sums = [each * fade for each in load.sums]
            load.seen_s = load.seen_s * fade + self._step_s
        self._step = step


class _Part:
    """The requests of one short period. Requests whose answers end at their limit have their tokens
    in `sums`. Of all other requests, it keeps the number and the prompts' tokens, by kind."""

    __slots__ = ("prompts", "requests", "sums")

    def __init__(self) -> None:
        self.sums = LoadSums().sums
        self.requests: dict[int, float] = {}
        self.prompts: dict[int, float] = {}


class PresentLoad:
    """The requests since the mix last changed, but of at most a window.

    The last seconds are compared with the whole time before them, for several numbers of seconds.
    If one of the comparisons differs by `CHANGED` standard errors, the time before is forgotten: a
    clear change shows after few requests, and without one the sums cover the whole window.
    """

    def __init__(self, window_s: float, lengths: RunningLengths) -> None:
        self.load = LoadSums()
        self.since_s = 0.0  # the earliest time at which the oldest of these requests can have come
        self._lengths = lengths
        self._part_s = max(window_s / MOST_PARTS, min(PART_S, window_s / LEAST_PARTS))
        self._most = max(int(window_s / self._part_s), 1)
        self._parts: deque[_Part] = deque()
        self._newest = _Part()
        self._part: int | None = None

    def add(self, new_tokens: int, cached_tokens: int, most_tokens: float, now: float) -> None:
        """Adds a request whose answer has at most this many tokens after the first."""
        self.advance(now)
        part, load = self._newest, LoadSums()
        kind = kind_of(new_tokens + cached_tokens, cached_tokens)
        limited = most_tokens <= self._lengths.of(kind).mean - 1.0
        load.add(new_tokens, cached_tokens, most_tokens if limited else 0.0)
        part.sums = [before + more for before, more in zip(part.sums, load.sums, strict=True)]
        if not limited:
            part.requests[kind] = part.requests.get(kind, 0.0) + 1.0
            prompt = float(new_tokens + cached_tokens)
            part.prompts[kind] = part.prompts.get(kind, 0.0) + prompt

    def advance(self, now: float) -> None:
        """Forgets requests that are too old, or came before a change."""
        part = int(now / self._part_s)
        if self._part is None:
            self._part, self.since_s = part, now
        if part == self._part:
            return
        for _ in range(min(part - self._part, self._most + 1)):
            self._parts.append(self._newest)
            self._newest = _Part()
        self._part = part
        self._keep(min(len(self._parts), self._most), now)
        lately = self._lately(lambda found: found.mean)
        keep = self._since_change(lately)
        self._keep(keep, now)
        self.load.sums, self.load.seen_s = lately[keep - 1].tolist(), keep * self._part_s

    def with_lengths(self, choose: Callable[[LengthRange], float]) -> LoadSums:
        """Returns the same requests with these predicted lengths of answers."""
        load = LoadSums()
        load.seen_s = self.load.seen_s
        if self._parts:
            load.sums = self._lately(choose)[-1].tolist()
        return load

    def _lately(self, choose: Callable[[LengthRange], float]) -> Floats:
        """Returns the sums of the last 1, 2, ... parts. A fixed order of additions makes the sums
        the same on every machine."""
        means = [max(choose(self._lengths.of(kind)) - 1.0, 0.0) for kind in range(NUM_KINDS)]
        rows = [_with_means(part, means) for part in reversed(self._parts)]
        lately: Floats = np.cumsum(np.array(rows), axis=0)
        return lately

    def _keep(self, count: int, now: float) -> None:
        if count == len(self._parts):
            return
        while len(self._parts) > count:
            self._parts.popleft()
        self.since_s = now - count * self._part_s

    def _since_change(self, lately: Floats) -> int:
        """Returns the parts since the clearest change, or all parts if there is no change. The
        standard error is computed from the requests before and after the change together, as if
        nothing had changed."""
        num = len(lately)
        after = np.arange(LEAST_CHANGED, num - LEAST_CHANGED + 1)
        if not len(after):
            return num
        sums, whole = lately[after - 1], lately[-1]
        before = num - after
        most = np.zeros(len(after))
        for tokens, squares in ((1, 2), (4, 6)):
            difference = sums[:, tokens] / after - (whole[tokens] - sums[:, tokens]) / before
            error = np.sqrt(whole[squares] / num * (1.0 / after + 1.0 / before))
            most = np.maximum(most, np.abs(difference) / np.maximum(error, TINY_S))
        best = int(most.argmax())
        return int(after[best]) if most[best] >= CHANGED else num


def _with_means(part: _Part, means: Sequence[float]) -> list[float]:
    sums = list(part.sums)
    for kind, count in part.requests.items():
        mean = means[kind]
        sums[4] += count * mean
        sums[5] += mean * (part.prompts[kind] + 0.5 * count * mean)
        sums[6] += count * mean * mean
    return sums


class RoleBalance:
    """Tracks the demand, and advises switches when the ratio of roles surely does not fit it."""

    def __init__(
        self, window_s: float, slo: Slo, load_limit: float = 1.0, serves_least: bool = False
    ) -> None:
        """`load_limit`: share of the SLO and of the memory that may be used. `serves_least`:
        whether, under overload, the requests that need least are served (admission "goodput")."""
        self._window_s = window_s
        self._tbt_s = slo.tbt_s * load_limit
        self._load_limit = load_limit
        self._short_s = min(SHORT_WINDOW_S, window_s / 2)
        self._least_seen_s = min(LEAST_SEEN_S, window_s / 4)
        self._lengths = RunningLengths()
        self._present = PresentLoad(window_s, self._lengths)
        self._offered = OfferedLoad(window_s)
        self._lately = OfferedLoad(self._short_s)
        self._recent = RecentRequests() if serves_least else None
        self._paused_until_s = 0.0
        self._last: tuple[float, Role] | None = None  # time and role of the last switches
        self._returned_s = -inf  # time when roles last switched back

    def note_arrival(
        self, num_tokens: int, cached_tokens: int, max_answer_tokens: int, now: float
    ) -> None:
        """Adds a request that has arrived, served or not. The prefill produces the first token of
        the request's answer."""
        cached_tokens = min(cached_tokens, num_tokens)
        most_tokens = max(max_answer_tokens - 1.0, 0.0)
        expected = self._lengths.of(kind_of(num_tokens, cached_tokens)).mean - 1.0
        for offered in (self._offered, self._lately):
            answer_tokens = max(min(most_tokens, expected), 0.0)
            offered.add(num_tokens - cached_tokens, cached_tokens, answer_tokens, now)
        self._present.add(num_tokens - cached_tokens, cached_tokens, most_tokens, now)
        if self._recent is not None:
            kind = kind_of(num_tokens, cached_tokens)
            new_tokens = num_tokens - cached_tokens
            self._recent.add(RecentRequest(now, new_tokens, cached_tokens, most_tokens, kind))

    def note_answer(self, num_prompt_tokens: int, cached_tokens: int, num_generated: int) -> None:
        """Learns the length of a complete answer."""
        self._lengths.note_answer(kind_of(num_prompt_tokens, cached_tokens), num_generated)

    def note_running(self, running: Iterable[tuple[int, int, int]]) -> None:
        """Takes all answers under way: tokens of the prompt, of its cached part, and of the answer
        so far."""
        self._lengths.look(
            (kind_of(num_tokens, cached_tokens), num_generated)
            for num_tokens, cached_tokens, num_generated in running
        )

    def pause(self, now: float) -> None:
        """Pauses switching after an instance has failed to switch."""
        self._paused_until_s = now + self._window_s / 4

    def loads(self, table: InstanceTable, now: float) -> Pools:
        self._present.advance(now)
        return self._capacities(table, self._present.load).loads()

    def demand(self, table: InstanceTable, now: float) -> Pools | None:
        """Returns the demand in instances that would always be busy, for the window in which it is
        higher. Returns None until half of the short window has passed. A pool without instances
        gets NaN."""
        self._offered.advance(now)
        self._lately.advance(now)
        if self._offered.load.seen_s < self._short_s / 2:
            return None
        long, short = (
            self._capacities(table, each.load).loads() for each in (self._offered, self._lately)
        )
        return Pools(
            max(long.prefill, short.prefill) * table.num_prefills,
            max(long.decode, short.decode) * table.num_decodes,
        )

    def may_switch(self, now: float) -> bool:
        return now >= self._paused_until_s

    def advise(
        self,
        table: InstanceTable,
        losses: Sequence[tuple[int, int]],
        now: float,
        movable: Sequence[int] | None = None,
    ) -> RoleAdvice | None:
        """Returns the advice to switch, if it is certain enough. `losses`: attempts under way and
        blocks cached, by row; the instances that lose least switch first. `movable`: the rows that
        may switch, or None if all may. The caller follows the advice, or asks again."""
        present = self._present
        present.advance(now)
        if present.load.seen_s < self._least_seen_s:
            return None
        capacities = self._capacities(table, present.load, movable=movable)
        needs = self._needs(table)
        advice = _judge(capacities, table, losses, MARGIN, needs)
        if advice is None:
            return None
        sure, margin = self._bar(advice.role, now)
        if needs.load(*advice.then) > (1.0 - margin) * needs.load(*advice.now):
            return None
        less, more = present.load.errors()
        # The relative error of the ratio of both demands is the root of the sum of both squares.
        whole = max(sqrt(less * less + more * more), TINY_S)
        signs = (-sure, sure) if advice.role is Role.PREFILL else (sure, -sure)
        factors = Pools(
            max(1.0 + signs[0] * less * less / whole, 0.0),
            max(1.0 + signs[1] * more * more / whole, 0.0),
        )
        doubted = present.with_lengths(_MOST if advice.role is Role.PREFILL else _LEAST)
        capacities = self._capacities(table, doubted, factors, movable)
        least = _judge(capacities, table, losses, SURE_MARGIN, needs)
        if least is None or least.role is not advice.role:
            return None
        return advice

    def _needs(self, table: InstanceTable) -> Needs:
        if self._recent is None:
            return NO_NEEDS
        lengths = self._lengths
        return self._recent.needs(
            table, self._present.since_s, lambda kind: max(lengths.of(kind).mean - 1.0, 0.0)
        )

    def note_switch(self, role: Role, now: float) -> None:
        """Notes that the caller follows the advice."""
        if self._last is not None and self._last[1] is not role:
            self._returned_s = now
        self._last = (now, role)

    def _bar(self, role: Role, now: float) -> tuple[float, float]:
        """Returns how many standard errors the advice must bear, and its least benefit."""
        if self._last is None or self._last[1] is role:
            return SURE, MARGIN
        if self._present.since_s > self._last[0]:
            # the mix of requests has changed since then, whatever it was before
            return SURE, MARGIN_TO_RETURN
        again = now - self._returned_s < RETURN_S
        return SURE_TO_RETURN, MARGIN_TO_RETURN_AGAIN if again else MARGIN_TO_RETURN

    def _capacities(
        self,
        table: InstanceTable,
        load: LoadSums,
        factors: Pools = ONE,
        movable: Sequence[int] | None = None,
    ) -> _PoolCapacities:
        decode_s = load.decode_s(table, self._tbt_s / table.tbt_tail, self._load_limit)
        prefill_s = load.prefill_s(table)
        return _PoolCapacities(
            table, prefill_s * factors.prefill, decode_s * factors.decode, movable
        )


def _judge(
    capacities: _PoolCapacities,
    table: InstanceTable,
    losses: Sequence[tuple[int, int]],
    margin: float,
    needs: Needs,
) -> RoleAdvice | None:
    """Returns the switches that reduce the load of the fuller pool most, or under overload serve
    most requests; None if no switch helps enough."""
    before = capacities.loads()
    if before.worst < LOADED:
        return None
    least = (1.0 - margin) * needs.load(*before)
    best = None
    roles = [before.short_of]
    if len(needs.prefill) and before.worst > 1.0:
        # More instances of the less loaded pool may serve more of the requests.
        roles.append(Role.DECODE if roles[0] is Role.PREFILL else Role.PREFILL)
    for role in roles:
        rows, then = _switches(capacities, role, losses, needs)
        if rows and needs.load(*then) <= least:
            least = needs.load(*then)
            best = RoleAdvice(tuple(table.ids[row] for row in rows), role, before, then)
    return best


def _switches(
    capacities: _PoolCapacities, role: Role, losses: Sequence[tuple[int, int]], needs: Needs
) -> tuple[list[int], Pools]:
    """Returns the rows that should switch to this role, for as long as each switch helps, and the
    loads after that."""
    then = capacities.loads()
    least = needs.load(*then)
    moved: list[int] = []
    for row in capacities.donors(role, losses):
        capacities.move(row, role)
        after = capacities.loads()
        load = needs.load(*after)
        if load >= least:
            capacities.move_back(row, role)
            break
        moved.append(row)
        then, least = after, load
        if after.worst < LOADED:
            break
    for row in moved:
        capacities.move_back(row, role)
    return moved, then


class _PoolCapacities:
    """Capacities of both pools: sums over the instances of the inverse of the time that each would
    take for all the work."""

    def __init__(
        self,
        table: InstanceTable,
        prefill_s: Floats,
        decode_s: Floats,
        movable: Sequence[int] | None,
    ) -> None:
        self._table = table
        self._movable = movable
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
        """Moves an instance to the pool of this role."""
        sign = 1.0 if role is Role.PREFILL else -1.0
        self._prefill_capacity += sign / self._prefill_s[row]
        self._decode_capacity -= sign / self._decode_s[row]

    def move_back(self, row: int, role: Role) -> None:
        """Undoes a move to this role."""
        self.move(row, Role.DECODE if role is Role.PREFILL else Role.PREFILL)

    def donors(self, role: Role, losses: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the rows that could switch to this role, best first: by the ratio of their costs,
        then by what they lose. One instance of the present role must remain, and so must one with
        the most room."""
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
        if self._movable is not None:
            rows = [row for row in rows if row in self._movable]
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
