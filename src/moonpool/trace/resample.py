"""Further samples of a workload from one trace: a block bootstrap of stretches of time.

A trace is one sample of a workload. A draw joins stretches of the trace, each with a random start,
in the order of their starts, until they are as long as the trace. All arrivals of a stretch keep
their distances, so bursts stay as they are.

Sharing of prefixes stays within a stretch. A prompt whose cached prefix comes from before its
stretch gets a prefix of the same length from an earlier prompt of the draw: from the same
predecessor, if the draw has it and no other copy of the prompt continues it, else from the prompt
whose age is nearest. Copies have blocks of their own, except for common blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

import msgspec

from moonpool.trace.row import TraceRow
from moonpool.trace.transform import common_blocks

NUM_STRETCHES = 12
MOST_LOOKED_AT = 200
"""Prompts that may replace a predecessor and are considered, on each side of its age."""


class _Reuse(NamedTuple):
    """Leading blocks of a prompt that earlier prompts have, and the age of the last of them."""

    num_blocks: int
    age_s: float


def resample(rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    """Returns another sample of the workload. With seed 0, the draw is the trace itself, and so it
    is for a trace without duration or rows. The same seed gives the same rows."""
    if seed == 0 or not rows or rows[-1].arrived_s <= 0:
        return list(rows)
    rng = Random(seed)
    duration_s = rows[-1].arrived_s
    length_s = duration_s / NUM_STRETCHES
    starts_s = sorted(rng.random() * duration_s for _ in range(NUM_STRETCHES))
    times = [row.arrived_s for row in rows]
    reuses = list(_reuses(rows))
    draw = _Draw(common_blocks(rows), 1 + max((b for row in rows for b in row.hash_ids), default=0))
    for slot, start_s in enumerate(starts_s):
        for shift_s, low_s, high_s in _parts(start_s, length_s, duration_s):
            for number in range(bisect_left(times, low_s), bisect_left(times, high_s)):
                at_s = slot * length_s + times[number] + shift_s - start_s
                draw.add(number, rows[number], at_s, slot, reuses[number])
    return draw.rows or list(rows)


def _parts(start_s: float, length_s: float, duration_s: float) -> list[tuple[float, float, float]]:
    """Returns (shift, begin, end) of a stretch, which may go on at the start of the trace."""
    end_s = start_s + length_s
    if end_s <= duration_s:
        return [(0.0, start_s, end_s)]
    return [(0.0, start_s, float("inf")), (duration_s, 0.0, end_s - duration_s)]


def _reuses(rows: Sequence[TraceRow]) -> Iterator[_Reuse]:
    last_s: dict[int, float] = {}
    for row in rows:
        num = 0
        for block in row.hash_ids:
            if block not in last_s:
                break
            num += 1
        age_s = row.arrived_s - last_s[row.hash_ids[num - 1]] if num else 0.0
        yield _Reuse(num, age_s)
        for block in row.hash_ids:
            last_s[block] = row.arrived_s


def _named(name: str, slot: int) -> str:
    """Returns the name of a session or call in this slot. The slot keeps names apart when a draw
    contains the same session several times."""
    return f"{name}/{slot}" if name else ""


class _Draw:
    """The rows of a draw so far, and the names of their blocks."""

    def __init__(self, common: frozenset[int], first_free: int) -> None:
        self.rows: list[TraceRow] = []
        self._times: list[float] = []
        self._common = common
        self._fresh = count(first_free)
        # ids of the draw by (block of the trace, slot)
        self._names: dict[tuple[int, int], int] = {}
        self._last_slot: dict[int, int] = {}  # the last slot of each block of the trace
        self._drawn: set[int] = set()  # rows of the trace that were drawn
        self._replaced: set[int] = set()  # rows of the draw whose prefix another row continues

    def add(self, number: int, row: TraceRow, at_s: float, slot: int, reuse: _Reuse) -> None:
        """Adds row `number` of the trace."""
        ids = self._renamed(number, row.hash_ids, at_s, slot, reuse)
        self.rows.append(
            msgspec.structs.replace(
                row,
                arrived_s=at_s,
                hash_ids=ids,
                session=_named(row.session, slot),
                call=_named(row.call, slot),
                after=tuple(_named(call, slot) for call in row.after),
                parent=_named(row.parent, slot),
            )
        )
        self._times.append(at_s)
        self._drawn.add(number)
        for block, name in zip(row.hash_ids, ids, strict=True):
            if block not in self._common:
                self._names[block, slot] = name
                self._last_slot[block] = slot

    def _renamed(
        self, number: int, blocks: tuple[int, ...], at_s: float, slot: int, reuse: _Reuse
    ) -> tuple[int, ...]:
        prefix: Sequence[int] = self._known(blocks, slot)
        if len(prefix) < reuse.num_blocks:
            prefix = self._earlier(number, blocks, at_s, reuse) or prefix
        rest = len(blocks) - len(prefix)
        return (*prefix, *(next(self._fresh) for _ in range(rest)))

    def _known(self, blocks: tuple[int, ...], slot: int) -> list[int]:
        """Returns the names of the leading blocks that are common or in this slot already."""
        found = []
        for block in blocks:
            name = block if block in self._common else self._names.get((block, slot))
            if name is None:
                break
            found.append(name)
        return found

    def _earlier(
        self, number: int, blocks: tuple[int, ...], at_s: float, reuse: _Reuse
    ) -> tuple[int, ...]:
        """Returns names for the reused blocks, or () if no earlier prompt has this many."""
        slot = self._last_slot.get(blocks[reuse.num_blocks - 1])
        if slot is not None and number not in self._drawn:
            names = self._known(blocks[: reuse.num_blocks], slot)
            if len(names) == reuse.num_blocks:
                return tuple(names)
        at = bisect_left(self._times, at_s - reuse.age_s)
        for away in range(MOST_LOOKED_AT):
            for other in (at - 1 - away, at + away):
                if not 0 <= other < len(self.rows) or other in self._replaced:
                    continue
                if len(self.rows[other].hash_ids) >= reuse.num_blocks:
                    self._replaced.add(other)
                    return self.rows[other].hash_ids[: reuse.num_blocks]
        return ()
