"""Traces made from a trace: scaled down for small machines, or resampled with another seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import exp
from random import Random

import msgspec

from moonpool.trace.reader import Trace
from moonpool.trace.row import TraceError, TraceRow

SHIFT_S = 30.0
"""Largest shift of a session in time, so that its copies do not arrive together."""
COMMON_SHARE = 0.01
COMMON_ROWS = 100
"""Blocks in more than this share and number of prompts are common: system prompts or documents.
They do not link rows to a session, and all copies of a session share them."""


def parse_share(text: str) -> Fraction:
    """Parses `1/16` or `0.0625`. Raises ValueError unless it is above 0 and at most 1."""
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is not a share; use for example 1/16") from None
    if not 0 < share <= 1:
        raise ValueError(f"{text} is not above 0 and at most 1; use for example 1/16")
    return share


def scale_trace(trace: Trace, share: Fraction) -> Trace:
    """The same arrivals and sharing, with `share` of the tokens of lengths and blocks.

    Sharing stays exact: a prompt of n blocks keeps its n ids, because ceil(ceil(tokens * share) /
    (block * share)) = ceil(tokens / block). Raises TraceError if a block would not have a whole
    number of tokens.
    """
    if share == 1:
        return trace
    info = trace.info
    block = info.block_tokens * share
    if block.denominator != 1:
        raise TraceError(
            f"blocks of {info.block_tokens} tokens times {share} are not whole tokens:"
            f" scale by 1/n where n divides {info.block_tokens}"
        )
    scaled = msgspec.structs.replace(info, block_tokens=int(block))
    return Trace(scaled, scale_rows(trace, share))


def scale_rows(rows: Iterable[TraceRow], share: Fraction) -> Iterator[TraceRow]:
    """Scales lengths. Prompts are rounded up, which keeps their blocks; answers to the nearest."""
    up, down = share.numerator, share.denominator
    for row in rows:
        yield TraceRow(
            row.arrived_s,
            -(-row.input_tokens * up // down),
            max((2 * row.output_tokens * up + down) // (2 * down), 1),
            row.hash_ids,
            row.session,
        )


def sessions_of(rows: Sequence[TraceRow], common: frozenset[int]) -> list[list[int]]:
    """The indices of the rows of each session, in order.

    Rows that share a block which is not `common`, or a session name, are of one session.
    """
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
    """Another sample of the workload: a bootstrap of whole sessions. Seed 0 is the trace itself.

    A trace is one sample of a workload. Requests of a session are linked by the blocks they share,
    so whole sessions are drawn with replacement: each appears Poisson(1) times, moved by at most
    SHIFT_S. Lengths, turns and gaps stay as they are, and so does the rate over more than a minute
    or two. Copies have blocks of their own, except for common blocks. If no session is drawn, the
    result is the trace itself. The same seed gives the same rows.
    """
    if seed == 0 or not rows:
        return list(rows)
    rng = Random(seed)
    common = common_blocks(rows)
    stride = 1 + max((block for row in rows for block in row.hash_ids), default=0)
    last_s = rows[-1].arrived_s
    drawn: list[TraceRow] = []
    for places in sessions_of(rows, common):
        for copy in range(_poisson_1(rng)):
            # The session moves as a whole, within the time of the trace.
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
    """The blocks that many sessions share: system prompts and documents."""
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
