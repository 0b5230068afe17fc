"""Turns the rows of a trace into the arrivals of a simulation, with the pool's block keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moonpool.trace.blocks import private_keys, prompt_keys
from moonpool.trace.row import TraceError, TraceRow
from moonpool.types import BlockKey, ProgramContext

LATEST_S = 1e9
"""The latest arrival in seconds. Beyond this time, a float cannot resolve microseconds."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `keys` has the keys of the prompt's full blocks, in the pool's block size."""

    arrived_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[BlockKey, ...]
    tenant: str = ""
    priority: int = 0
    call: str = ""  # `TraceRow` explains this and the fields below
    after: tuple[str, ...] = ()
    delay_s: float = 0.0
    session: str = ""
    parent: str = ""
    tool: str = ""
    slo_class: str = ""

    @property
    def program(self) -> ProgramContext | None:
        """The program that the client names for this request, or None for a standalone call."""
        if not self.call or not self.session:
            return None
        return ProgramContext(program_id=self.session, parent_id=self.parent, tool=self.tool)


def make_arrivals(
    rows: Iterable[TraceRow],
    trace_block_tokens: int,
    block_tokens: int,
    largest_tokens: int,
) -> Iterator[Arrival]:
    """Yields one arrival per row. A request may have at most `largest_tokens` tokens in total.

    A row without hashes gets unique keys. Raises TraceError if neither block size divides the
    other, if a row arrives too late, or if a request is too large for every instance.
    """
    for number, row in enumerate(rows):
        if row.arrived_s > LATEST_S:
            raise TraceError(
                f"request {number + 1} arrives {row.arrived_s:.3g} s after the first, more than"
                " 30 years: check the unit of the trace's times, or replay it with --speed"
            )
        if row.input_tokens + row.output_tokens > largest_tokens:
            raise TraceError(
                f"request {number + 1} has {row.input_tokens + row.output_tokens:,} tokens, and no"
                f" instance holds more than {largest_tokens:,}: raise"
                " pool.dram_tokens_per_instance, or use nodes with more memory"
            )
        if row.hash_ids:
            try:
                keys = prompt_keys(row.hash_ids, row.input_tokens, trace_block_tokens, block_tokens)
            except ValueError as error:
                raise TraceError(str(error)) from None
        else:
            keys = private_keys(number, row.input_tokens, block_tokens)
        shape = row.input_tokens, row.output_tokens
        yield Arrival(
            row.arrived_s,
            *shape,
            keys,
            row.tenant,
            row.priority,
            row.call,
            row.after,
            row.delay_s,
            row.session,
            row.parent,
            row.tool,
            row.slo_class,
        )
