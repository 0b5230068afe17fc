"""Dynamo's agentic Mooncake traces of version 2: a header, then one call per line.

Each call names its play (a program), its session (an agent of it), and the calls that it depends
on: it starts `delay_ms` after they completed, or after they were dispatched. If a call has several
delays, the longest one counts, after the last of the named calls has ended. A call that depends
only on dispatched calls waits for the same calls as these, and then for its delay.

Block ids are unique within a play.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from moonpool.trace.agent_rows import whole
from moonpool.trace.programs import block_id
from moonpool.trace.row import MAX_LENGTH_TOKENS, OTHER_LINE, UNTIMED, LineError, ParsedRow
from moonpool.trace.wrong_lines import explain, wrong_ids
from moonpool.types import MALFORMED

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[float, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]


class _Dependency(msgspec.Struct, gc=False):
    request_id: str
    trigger: str = "completion"
    delay_ms: _Time = 0.0


class _GraphLine(msgspec.Struct, gc=False):
    request_id: str | None = None
    play_id: str = ""
    session_id: str = ""
    input_length: _Length | None = None
    output_length: _Length | None = None
    input_tokens: _Length | None = None
    output_tokens: _Length | None = None
    hash_ids: tuple[int, ...] | None = None
    not_before_ms: _Time = 0.0
    dependencies: tuple[_Dependency, ...] | None = None
    schema: str = ""
    block_size: int = 0


def is_graph(first: dict[str, Any]) -> bool:
    """Whether a file's first object is the header of such a trace."""
    return first.get("schema") == SCHEMA


class GraphParser:
    """Parses one call per line, after the header."""

    format = "dynamo"
    header_lines = 1
    units_per_s = 1000.0
    ignored: tuple[str, ...] = ()

    def __init__(self, header: dict[str, Any]) -> None:
        """Raises LineError for another version, and without the size of a block."""
        version, size = header.get("version"), header.get("block_size")
        if version != VERSION:
            raise LineError(f"version is {version!r:.40}; only version {VERSION} is known")
        if type(size) is not int or size < 1:
            raise LineError(f"block_size is {size!r:.40}; it must be an integer, 1 or more")
        self.block_tokens = size
        self._decode = msgspec.json.Decoder(_GraphLine).decode
        self._first_agents: dict[str, str] = {}  # by play

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            raise LineError(explain(line, _GraphLine, "agentic", error)) from None
        if row.schema == SCHEMA:  # this is the header of a second file that follows the first
            if row.block_size != self.block_tokens:
                raise LineError(f"block_size is {row.block_size}, before it {self.block_tokens}")
            return OTHER_LINE
        if row.request_id is None:
            raise LineError("this row has no request_id")
        ended = [one for one in row.dependencies or () if one.trigger == "completion"]
        begun = [one for one in row.dependencies or () if one.trigger != "completion"]
        program, agent = row.play_id or row.session_id, row.session_id or row.play_id
        # Other agents are sub-agents of the agents that they depend on.
        is_root = not ended and not begun
        first = self._first_agents.setdefault(program, agent) if is_root else agent
        num_input = self._length("input_length", row.input_length, row.input_tokens)
        return ParsedRow(
            row.not_before_ms if is_root else UNTIMED,
            num_input,
            self._length("output_length", row.output_length, row.output_tokens),
            self._blocks(row, num_input, program),
            agent,
            call=row.request_id,
            after=tuple(one.request_id for one in ended),
            delay_s=None if is_root else max(one.delay_ms for one in ended or begun) / 1000.0,
            parent="" if agent == first else first,
            alongside=tuple(one.request_id for one in begun),
        )

    def _length(self, name: str, length: float | None, other: float | None) -> int:
        found = other if length is None else length
        if found is None:
            raise LineError(f"this row has no {name}")
        return whole(name, found)

    def _blocks(self, row: _GraphLine, num_input: int, program: str) -> tuple[int, ...]:
        num_blocks = -(-num_input // self.block_tokens)
        if row.hash_ids is None:
            return tuple(
                block_id(f"{row.session_id}//{number}".encode()) for number in range(num_blocks)
            )
        if len(row.hash_ids) != num_blocks:
            raise LineError(wrong_ids(len(row.hash_ids), num_input, self.block_tokens))
        return tuple(block_id(f"{program}/{one}".encode()) for one in row.hash_ids)
