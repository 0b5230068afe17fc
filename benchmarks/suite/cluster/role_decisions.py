"""The decisions of the role balance over a day, without a cluster: thousands of days take minutes.

A day's requests are passed to the deciding object as the Conductor passes them. The object's
switches take place at once. Answers end, and are learned from, after their prefill and a step for
each token. The best split of a phase minimises the load of the fuller pool, computed from the real
lengths of the phase's requests. The figures say how soon a nearly optimal split was reached, and
how often a switch reversed the previous one within a phase (several reversals in one phase are an
oscillation).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any

from benchmarks.suite.cluster.role_days import abrupt_day
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.roles.role_balance import LoadSums, Pools, RoleBalance
from moonpool.config.parse import parse_config
from moonpool.protocol.messages import InstanceInfo
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.trace.generate import BLOCK_TOKENS, generate_mix
from moonpool.trace.profile import Mix
from moonpool.trace.row import TraceRow
from moonpool.types import InstanceId, Role, Slo

SLO = Slo(ttft_s=10.0, tbt_s=0.05)
LOAD_LIMIT = 0.9
CHECK_S = 2.0
STEP_S = 0.04
PREFILL_S = 1.5
NEARLY = 1.1
"""A split is nearly as good as the best one if its fuller pool has at most this times its load, or
is below half of its capacity."""
FOLLOWED_S = 60.0


class DecidedDay:
    """One day of a cluster that has as many instances of each role at the start."""

    def __init__(self, mix: Mix, seed: int, num_instances: int, window_s: float) -> None:
        self.table = _table(num_instances)
        self.balance = RoleBalance(window_s, SLO, LOAD_LIMIT)
        self.splits: list[tuple[float, int]] = [(0.0, self.table.num_prefills)]
        self._mix, self._seed = mix, seed
        self._phase_s = mix.day_s / len(mix.kinds[0].by_hour)
        self._truth = [LoadSums() for _ in mix.kinds[0].by_hour]
        self._answers: list[tuple[float, int, int, int]] = []
        self._seen: set[int] = set()
        self._next_check_s = 0.0

    def run(self) -> None:
        for row in generate_mix(self._mix, duration_s=self._mix.day_s - 1e-3, seed=self._seed):
            self._until(row.arrived_s)
            self._arrive(row)

    def _until(self, now: float) -> None:
        while self._next_check_s <= now:
            at_s = self._next_check_s
            while self._answers and self._answers[0][0] <= at_s:
                _, *answer = heapq.heappop(self._answers)
                self.balance.note_answer(*answer)
            self.balance.note_running(self._running(at_s))
            self._check(at_s)
            self._next_check_s += CHECK_S

    def _arrive(self, row: TraceRow) -> None:
        now, cached = row.arrived_s, self._cached_tokens(row)
        self.balance.note_arrival(row.input_tokens, cached, 100_000, now)
        ends_s = now + PREFILL_S + STEP_S * row.output_tokens
        heapq.heappush(self._answers, (ends_s, row.input_tokens, cached, row.output_tokens))
        truth = self._truth[int(now / self._phase_s)]
        truth.add(row.input_tokens - cached, cached, row.output_tokens - 1.0)

    def _running(self, now: float) -> Iterator[tuple[int, int, int]]:
        for ends_s, num_tokens, cached, num_generated in self._answers:
            so_far = num_generated - int((ends_s - now) / STEP_S)
            if so_far > 0:
                yield num_tokens, cached, so_far

    def _cached_tokens(self, row: TraceRow) -> int:
        count = 0
        for each in row.hash_ids:
            if each not in self._seen:
                break
            count += 1
        self._seen.update(row.hash_ids)
        return min(count * BLOCK_TOKENS, row.input_tokens - 1)

    def _check(self, now: float) -> None:
        advice = self.balance.advise(self.table, [(0, 0)] * len(self.table), now)
        if advice is None or not self.balance.may_switch(now):
            return
        self.balance.note_switch(advice.role, now)
        prefills = advice.role is Role.PREFILL
        for name in advice.instance_ids:
            self.table.set_role(self.table.ids.index(name), prefills, not prefills)
        self.splits.append((now, self.table.num_prefills))

    def phases(self) -> list[dict[str, Any]]:
        """Returns how each phase went."""
        return [self._phase(number) for number in range(len(self._truth))]

    def _phase(self, number: int) -> dict[str, Any]:
        begin_s, end_s = number * self._phase_s, (number + 1) * self._phase_s
        loads = self._loads(number)
        best = min(loads, key=lambda split: loads[split].worst)
        limit = max(NEARLY * loads[best].worst, 0.5)
        good = [split for split, load in loads.items() if load.worst <= limit]
        at_begin = [count for at_s, count in self.splits if at_s <= begin_s][-1]
        steps = [(begin_s, at_begin)]
        steps += [(at_s, count) for at_s, count in self.splits if begin_s < at_s < end_s]
        reached = [at_s - begin_s for at_s, count in steps if count in good]
        signs = [after[1] > before[1] for before, after in pairwise(steps)]
        over_s = sum(
            min(after[0], end_s) - before[0]
            for before, after in pairwise([*steps, (end_s, 0)])
            if before[1] not in good
        )
        return {
            "best": best,
            "load": round(loads[best].worst, 3),
            "good": good,
            "steps": [(round(at_s - begin_s), count) for at_s, count in steps],
            "reached_s": round(reached[0]) if reached else None,
            "not_good_s": round(over_s),
            "turns": sum(one is not other for one, other in pairwise(signs)),
        }

    def _loads(self, number: int) -> dict[int, Pools]:
        truth, table = self._truth[number], self.table
        truth.seen_s = self._phase_s
        prefill_s = float(truth.prefill_s(table)[0])
        decode_s = float(truth.decode_s(table, SLO.tbt_s * LOAD_LIMIT, LOAD_LIMIT)[0])
        return {
            split: Pools(prefill_s / split, decode_s / (len(table) - split))
            for split in range(1, len(table))
        }


def decided_days(
    seeds: Sequence[int],
    num_phases: int,
    phase_s: float,
    tell: Callable[[str], None],
    num_instances: int = 6,
    window_s: float = 120.0,
) -> dict[str, Any]:
    """Simulates abrupt days of these seeds, and reports the figures of each; returns the figures of
    all."""
    total: Counter[str] = Counter()
    reached: list[float] = []
    not_good_s = 0.0
    for seed in seeds:
        day = DecidedDay(abrupt_day(seed, num_phases, phase_s), seed, num_instances, window_s)
        day.run()
        phases = day.phases()
        reached += [inf if p["reached_s"] is None else p["reached_s"] for p in phases[1:]]
        not_good_s += sum(phase["not_good_s"] for phase in phases[1:])
        total["switches"] += len(day.splits) - 1
        total["turns"] += sum(phase["turns"] for phase in phases)
        total["phases_with_several_turns"] += sum(phase["turns"] > 1 for phase in phases)
        tell(f"day {seed}: prefill instances by second {day.splits}")
    reached.sort()
    shifts = len(reached)
    return {
        "days": len(seeds),
        "shifts": shifts,
        "followed_in_60_s": round(sum(s <= FOLLOWED_S for s in reached) / shifts, 4),
        "reached_s": {f"p{n}": _finite(reached[shifts * n // 100]) for n in (50, 80, 90)},
        "mean_not_good_s": round(not_good_s / shifts, 1),
        **total,
        "seeds": [seeds[0], seeds[-1]],
        "phase_s": phase_s,
        "window_s": window_s,
    }


def _finite(seconds: float) -> float | None:
    """Returns None for an infinite time, which means that the split was not reached within its
    phase."""
    return seconds if seconds < inf else None


def _table(num_instances: int) -> InstanceTable:
    """Makes a table with this many instances of each role of the default node, without anything
    booked."""
    config = parse_config("", {"slo": {"ttft_s": SLO.ttft_s, "tbt_s": SLO.tbt_s}}, DEFAULTS)
    hardware = build_hardware(config)
    table = InstanceTable(SLO.tbt_s)
    for row in range(num_instances):
        role = Role.PREFILL if row < num_instances // 2 else Role.DECODE
        node, name = hardware.of_role(role), InstanceId(f"{role.value}-{row}")
        info = InstanceInfo(
            instance_id=name,
            role=role,
            incarnation=1,
            address=PeerAddress(name, name, "", "", 0),
            layout=hardware.layout,
            num_blocks=3_000_000 // hardware.layout.block_tokens,
            cost=node.estimate,
            pid=0,
            host=name,
            engine_tokens=node.engine_tokens,
            chunk_tokens=config.engine.chunk_tokens,
        )
        table.join(row, info)
    return table
