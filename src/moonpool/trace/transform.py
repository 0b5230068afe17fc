"""Traces made from a trace: scaled down for small machines; and the blocks that many rows share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import msgspec

from moonpool.trace.reader import Trace
from moonpool.trace.row import TraceError, TraceRow

COMMON_SHARE = 0.01
COMMON_ROWS = 100
"""Blocks in more than this share and number of prompts are common: system prompts or documents.
All copies of a request share these values."""


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
    """Returns the same arrivals and sharing, with `share` of the tokens of lengths and blocks.

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
        yield msgspec.structs.replace(
            row,
            input_tokens=-(-row.input_tokens * up // down),
            output_tokens=max((2 * row.output_tokens * up + down) // (2 * down), 1),
        )


def common_blocks(rows: Sequence[TraceRow]) -> frozenset[int]:
    """The blocks that many sessions share: system prompts and documents."""
    least = max(COMMON_ROWS, COMMON_SHARE * len(rows))
    uses = Counter(block for row in rows for block in set(row.hash_ids))
    return frozenset(block for block, count in uses.items() if count > least)
