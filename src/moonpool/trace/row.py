"""The rows of a trace: as a parser reads them, and as the reader yields them; with the two errors.

A trace holds arrival times, lengths and shared prompt blocks of requests. A row has no text, and
does not tell how the request was served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from moonpool.types import Struct

MAX_LENGTH_TOKENS = 10**9
"""A longer prompt or answer in a file is an error."""


class TraceError(ValueError):
    """A trace cannot be used. The message is one line: the file and line, the problem, and what to
    do."""


class TraceRow(Struct, frozen=True, kw_only=False, gc=False):
    """One request. `arrived_s` counts from the start of the trace.

    `hash_ids` are the ids of the prompt's blocks, in the block size of the trace; the last block is
    usually partial. Equal ids mean equal whole prefixes. Without hashes the tuple is empty. Tenants
    share no prefixes, so their ids differ. `priority`: a lower one is served first, as in the API.

    A call of a program (an agent) has a name, `call`, and waits for the calls in `after`: it starts
    `delay_s`, the time that its tools ran, after the last of those has ended. `arrived_s` is then
    the time of its program. `session` names its agent, and `parent` the agent that waits for that
    agent; "" means that no agent waits. `tool`: the tool that runs when the call has ended.

    `slo_class` names the class whose service levels apply; "" means the class of its tenant, if
    there is one, or none.
    """

    arrived_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    tenant: str = ""
    priority: int = 0
    call: str = ""
    after: tuple[str, ...] = ()
    delay_s: float = 0.0
    parent: str = ""
    tool: str = ""
    slo_class: str = ""

    def faster(self, speed: float) -> TraceRow:
        """Returns the same request in a trace that arrives `speed` times as fast. Tools run as long
        as they did."""
        return msgspec.structs.replace(self, arrived_s=self.arrived_s / speed)


class TraceInfo(Struct, frozen=True):
    """The result of the first pass over a file.

    `block_tokens` is the block size of the trace (0: no hashes). `tick_s` is the step to which its
    times were rounded (0: not rounded, or not noticeably). `skipped_rows` had no prompt or no
    answer, and `other_lines` of a log were no requests; neither are part of `num_rows`. `ignored`
    are fields that the parser does not use. `has_programs`: whether some rows start when others
    have ended.
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
    other_lines: int = 0
    has_programs: bool = False


UNTIMED = float("-inf")
"""The time of a row that has none."""


class ParsedRow(NamedTuple):
    """One row of a file. `time` is in the parser's units since the file's own origin.

    `delay_s`: it starts this long after the rows named in `after`, or after the previous row of its
    `session`; None means at `time`. `ended`: when its answer ended, in the units of `time`: the
    next row of its session then starts as long after that end as in the file. `adds`: whether its
    prompt is `input_tokens` longer than the previous prompt and answer of its session. `alongside`:
    it starts `delay_s` after these rows began, if it waits for no row to end.
    """

    time: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    tenant: str = ""
    priority: int = 0
    call: str = ""
    after: tuple[str, ...] = ()
    delay_s: float | None = None
    parent: str = ""
    tool: str = ""
    ended: float | None = None
    adds: bool = False
    slo_class: str = ""
    alongside: tuple[str, ...] = ()


OTHER_LINE = ParsedRow(-1.0, 0, 0)
"""What a parser returns for a line of a log that is not a request."""


class LineError(ValueError):
    """A line cannot be used. The reader adds the file name and the line number."""


class LaterCallError(LineError):
    """A row waits for a call that is not on an earlier line."""


@runtime_checkable
class Parser(Protocol):
    """Parses single lines. `parse` raises `LineError`; it returns None for a row to skip and count,
    and OTHER_LINE for a line that is not a row at all."""

    format: str
    block_tokens: int  # 0 means that there are no hashes
    header_lines: int
    ignored: tuple[str, ...]  # fields of the file that the parser does not use

    @property
    def units_per_s(self) -> float: ...

    def parse(self, line: bytes) -> ParsedRow | None:
        """Parses one line, with its newline. Raises LineError."""
        ...


class ProgramParser(Protocol):
    """Parses lines that each have a whole program. Otherwise it is like `Parser`."""

    format: str
    block_tokens: int
    header_lines: int
    ignored: tuple[str, ...]

    @property
    def units_per_s(self) -> float: ...

    def begin(self) -> None:
        """Called when a pass over the file begins."""
        ...

    def parse_program(self, line: bytes) -> Sequence[ParsedRow]:
        """Returns the calls of the line's program, each after the calls that it waits for, or none
        to leave it out. Raises LineError."""
        ...


def damage(line: bytes) -> str | None:
    """Returns the fault in the bytes of a line, or None."""
    if b"\0" in line:
        return "the line has binary data; this is not a text file"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not valid UTF-8; the file is damaged or not text"
    return None
