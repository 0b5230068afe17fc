"""Another trace like this one: its sessions drawn anew, with replacement, and moved a little in
time.

One trace is one sample of what may come. Requests of a session hang together by the blocks they
share, so whole sessions are drawn (a bootstrap); lengths, turns and the pauses between them stay as
they were, and so does the rate over more than a minute or two. The same seed gives the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp
from random import Random

from moonpool.trace.row import TraceRow

SHIFT_S = 30.0
"""A session is moved by up to this much, so that no two copies of it come together."""
COMMON_SHARE = 0.01
COMMON_ROWS = 100
"""Blocks of more than this share of all prompts, and of more prompts than this, are system prompts
or documents: they do not make a session, and copies of a session share them."""


def sessions_of(rows: Sequence[TraceRow], common: frozenset[int]) -> list[list[int]]:
    """Places of the rows of each session, in order. Rows belong together that share a block which
    is not `common`, or have the same session name."""
    parents = list(range(len(rows)))
    first_with: dict[int | str, int] = {}

    def root_of(place: int) -> int:
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    for place, row in enumerate(rows):
        names: list[int | str] = [block for block in row.hash_ids if block not in common]
        if row.session:
            names.append(row.session)
        for name in names:
            other = first_with.setdefault(name, place)
            if other != place:
                parents[root_of(place)] = root_of(other)
    sessions: dict[int, list[int]] = {}
    for place in range(len(rows)):
        sessions.setdefault(root_of(place), []).append(place)
    return list(sessions.values())


def resample(rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    """Seed 0 is the trace as it is. Any other: each session none, one or several times (Poisson of
    mean 1); a further copy has blocks of its own, but for common ones. A draw of no session at all,
    which few of them may give, would say nothing: it is the trace as it is, too."""
    if seed == 0 or not rows:
        return list(rows)
    rng = Random(seed)
    common = common_blocks(rows)
    stride = 1 + max((block for row in rows for block in row.hash_ids), default=0)
    last_s = rows[-1].arrived_s
    drawn: list[TraceRow] = []
    for places in sessions_of(rows, common):
        for copy in range(_poisson_1(rng)):
            # As a whole, and not beyond either end.
            earliest_s = max(-SHIFT_S, -rows[places[0]].arrived_s)
            latest_s = min(SHIFT_S, last_s - rows[places[-1]].arrived_s)
            shift_s = earliest_s + rng.random() * (latest_s - earliest_s)
            drawn += [_copied(rows[place], shift_s, copy, stride, common) for place in places]
    drawn.sort(key=lambda row: row.arrived_s)
    return drawn or list(rows)


def _copied(
    row: TraceRow, shift_s: float, copy: int, stride: int, common: frozenset[int]
) -> TraceRow:
    ids = row.hash_ids
    session = row.session
    if copy:
        ids = tuple(block if block in common else block + copy * stride for block in ids)
        session = f"{session}/{copy}" if session else ""
    arrived_s = max(row.arrived_s + shift_s, 0.0)
    return TraceRow(arrived_s, row.input_tokens, row.output_tokens, ids, session)


def common_blocks(rows: Sequence[TraceRow]) -> frozenset[int]:
    """System prompts and documents, which many sessions share."""
    least = max(COMMON_ROWS, COMMON_SHARE * len(rows))
    uses = Counter(block for row in rows for block in set(row.hash_ids))
    return frozenset(block for block, count in uses.items() if count > least)


def _poisson_1(rng: Random) -> int:
    left = rng.random()
    count, chance = 0, exp(-1.0)
    while left >= chance and count < 12:
        left -= chance
        count += 1
        chance /= count
    return count
