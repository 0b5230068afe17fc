"""The nouns of a trace: one request's row, what is known of the whole file, and the one error.

A trace says when requests came, how long they were and which prompt blocks they shared. It has no
text; it never says how a request was served.
"""

from __future__ import annotations

from moonpool.types import Struct

MAX_LENGTH_TOKENS = 10**9
"""A longer prompt or answer in a file is taken for damage."""


class TraceError(ValueError):
    """A trace cannot be used; one line says which file and line, what is wrong and what to do."""


class TraceRow(Struct, frozen=True, kw_only=False, gc=False):
    """One request. `arrived_s` counts from the trace's start.

    `hash_ids` names the prompt's blocks of the trace's own size, the last one usually partial;
    equal ids mean equal whole prefixes. Empty where the trace has none.
    """

    arrived_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""

    def faster(self, speed: float) -> TraceRow:
        """The same request, where all come `speed` times as fast."""
        at_s = self.arrived_s / speed
        return TraceRow(at_s, self.input_tokens, self.output_tokens, self.hash_ids, self.session)


class TraceInfo(Struct, frozen=True):
    """What a scan of the file found, before any row is handed out.

    `block_tokens` is the size of the trace's own blocks; 0: it has no hashes. `tick_s` is the step
    to which its times were rounded; 0: none that matters. `skipped_rows` had no prompt or no answer
    (failures), and are not among `num_rows`. `ignored` are fields that nothing here reads.
    """

    path: str
    format: str
    block_tokens: int
    num_rows: int
    skipped_rows: int
    duration_s: float
    tick_s: float
    is_sorted: bool
    ignored: tuple[str, ...] = ()
