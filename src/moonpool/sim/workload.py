"""A trace as the simulator's arrivals: its block hashes become names of the pool's own blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.sim.arrival import Arrival
from moonpool.trace.keys import private_keys, prompt_keys
from moonpool.trace.row import TraceError, TraceRow

LATEST_S = 1e9
"""Beyond, a float tells apart instants a microsecond from each other no more."""


def make_arrivals(
    rows: Iterable[TraceRow],
    trace_block_tokens: int,
    block_tokens: int,
    largest_tokens: int,
) -> Iterator[Arrival]:
    """One by one. Raises TraceError where the two block sizes do not fit, times are too far apart,
    or no instance could ever hold a request, which may have `largest_tokens` in all."""
    for number, row in enumerate(rows):
        if row.arrived_s > LATEST_S:
            raise TraceError(
                f"request {number + 1} arrives {row.arrived_s:.3g} s after the first, in more than"
                " 30 years: check the unit of the trace's times, or replay it with --speed"
            )
        if row.input_tokens + row.output_tokens > largest_tokens:
            raise TraceError(
                f"request {number + 1} has {row.input_tokens + row.output_tokens:,} tokens and no"
                f" instance holds more than {largest_tokens:,}: raise"
                " pool.dram_tokens_per_instance, or give the nodes more memory"
            )
        if row.hash_ids:
            try:
                keys = prompt_keys(row.hash_ids, row.input_tokens, trace_block_tokens, block_tokens)
            except ValueError as error:
                raise TraceError(str(error)) from None
        else:
            keys = private_keys(number, row.input_tokens, block_tokens)
        yield Arrival(row.arrived_s, row.input_tokens, row.output_tokens, keys)
