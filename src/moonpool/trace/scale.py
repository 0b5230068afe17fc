"""Makes a trace smaller, so that a small machine can serve it: lengths and blocks by one factor.

Owns the rounding. Sharing stays exact: a prompt of `n` blocks still has `n`, named by the same
ids, because ceil(ceil(tokens * share) / (block * share)) = ceil(tokens / block).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import msgspec

from moonpool.trace.reader import Trace
from moonpool.trace.row import TraceError, TraceRow


def parse_share(text: str) -> Fraction:
    """`1/16` or `0.0625`. Raises ValueError unless above 0 and at most 1."""
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is no share such as 1/16") from None
    if not 0 < share <= 1:
        raise ValueError(f"{text} is not above 0 and at most 1")
    return share


def scale_trace(trace: Trace, share: Fraction) -> Trace:
    """The same arrivals and sharing, with `share` of the tokens. Raises TraceError where the
    trace's blocks cannot be divided so."""
    if share == 1:
        return trace
    info = trace.info
    block = info.block_tokens * share
    if block.denominator != 1:
        raise TraceError(
            f"blocks of {info.block_tokens} tokens times {share} are no whole tokens:"
            f" scale by 1/n where n divides {info.block_tokens}"
        )
    scaled = msgspec.structs.replace(info, block_tokens=int(block))
    return Trace(scaled, scale_rows(trace, share))


def scale_rows(rows: Iterable[TraceRow], share: Fraction) -> Iterator[TraceRow]:
    """Prompts are rounded up, for the sake of their blocks; answers to the nearest, at least 1."""
    up, down = share.numerator, share.denominator
    for row in rows:
        yield TraceRow(
            row.arrived_s,
            -(-row.input_tokens * up // down),
            max((2 * row.output_tokens * up + down) // (2 * down), 1),
            row.hash_ids,
            row.session,
        )
