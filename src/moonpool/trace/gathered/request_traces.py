"""Dynamo's request traces, as `DYN_REQUEST_TRACE` writes them: a line at the end of each answer.

A line without a session is a standalone request. A request waits for the previous one of its
session if that had ended, for its parent's last request before the session began, and for
sub-agents that have ended since the previous request. A request starts as long after those requests
as it did in the file. Lines about tools are left out: their time is in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from moonpool.trace.agent_rows import plain_ids
from moonpool.trace.gathered.rows import Gatherer
from moonpool.trace.programs import SESSION_BLOCK_TOKENS
from moonpool.trace.row import MAX_LENGTH_TOKENS, UNTIMED, LineError, ParsedRow, damage
from moonpool.trace.wrong_lines import wrong_ids
from moonpool.types import MALFORMED

SCHEMA = "dynamo.request.trace.v1"
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]


class _ToolCall(msgspec.Struct, gc=False):
    name: str | None = None


class _Finish(msgspec.Struct, gc=False):
    tool_calls: tuple[_ToolCall, ...] | None = None


class _Replay(msgspec.Struct, gc=False):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH_TOKENS)]
    input_length: _Length
    input_sequence_hashes: tuple[int, ...]


class _Request(msgspec.Struct, gc=False):
    request_received_ms: _Time
    output_tokens: _Length | None = None
    request_id: str = ""
    input_tokens: _Length | None = None
    total_time_ms: _Time | None = None
    finish_reason_metadata: _Finish | None = None
    replay: _Replay | None = None


class _Agent(msgspec.Struct, gc=False):
    session_id: str
    parent_session_id: str | None = None


class _TraceLine(msgspec.Struct, gc=False):
    event_type: str
    schema: str = ""
    event_time_unix_ms: _Time | None = None
    agent_context: _Agent | None = None
    request: _Request | None = None


class _WrappedLine(msgspec.Struct, gc=False):
    event: _TraceLine


def is_request_trace(first: dict[str, Any]) -> bool:
    """Whether a file's first object is a line of such a trace, with or without a wrapper."""
    inner = first.get("event")
    return SCHEMA in (first.get("schema"), inner.get("schema") if isinstance(inner, dict) else None)


@dataclass(slots=True, eq=False)
class _Answer:
    row: ParsedRow
    ended: float


class RequestTrace(Gatherer):
    """The requests of a file, which are ordered when all are known."""

    format = "dynamo-requests"
    units_per_s = 1000.0

    def __init__(self) -> None:
        self.block_tokens = 0
        self.other_lines = 0
        self._answers: list[_Answer] = []
        self._decode = msgspec.json.Decoder(_TraceLine).decode
        self._decode_wrapped = msgspec.json.Decoder(_WrappedLine).decode

    def add(self, line: bytes) -> None:
        """Raises LineError."""
        found = self._decoded(line)
        if found.event_type != "request_end" or found.request is None:
            self.other_lines += 1
            return
        request, agent = found.request, found.agent_context
        begun = request.request_received_ms
        ended = found.event_time_unix_ms
        if ended is None:
            ended = begun + (request.total_time_ms or 0.0)
        num_input, ids = self._prompt(request)
        number = len(self._answers)
        row = ParsedRow(begun, num_input, request.output_tokens or 0, ids)
        if agent is not None:
            name = agent.session_id
            row = row._replace(
                session=name,
                parent=agent.parent_session_id or "",
                call=request.request_id or f"{name}#{number}",
                tool=_tool(request),
            )
        self.keep()
        self._answers.append(_Answer(row, max(ended, begun)))

    def _decoded(self, line: bytes) -> _TraceLine:
        try:
            return self._decode(line)
        except MALFORMED as error:
            try:
                return self._decode_wrapped(line).event
            except MALFORMED:
                raise LineError(damage(line) or f"no line of a {SCHEMA} file: {error}") from None

    def _prompt(self, request: _Request) -> tuple[int, tuple[int, ...]]:
        replay = request.replay
        if replay is None:
            if request.input_tokens is None:
                raise LineError("this request has neither input_tokens nor replay")
            return request.input_tokens, ()
        size = self.block_tokens = self.block_tokens or replay.trace_block_size
        if replay.trace_block_size != size:
            raise LineError(f"trace_block_size is {replay.trace_block_size}, before it {size}")
        ids, num_input = replay.input_sequence_hashes, replay.input_length
        if len(ids) != -(-num_input // size):
            raise LineError(wrong_ids(len(ids), num_input, size))
        return num_input, plain_ids(ids)

    def rows(self) -> Iterator[ParsedRow]:
        """The requests by their arrivals."""
        self.block_tokens = self.block_tokens or SESSION_BLOCK_TOKENS
        sessions = _Sessions()
        for answer in sorted(self._answers, key=lambda one: one.row.time):
            yield sessions.place(answer) if answer.row.session else answer.row


class _Sessions:
    """The sessions so far, with their last requests and the last ones of their sub-agents."""

    def __init__(self) -> None:
        self._last: dict[str, _Answer] = {}
        self._children: dict[str, set[str]] = {}

    def place(self, answer: _Answer) -> ParsedRow:
        row, begun = answer.row, answer.row.time
        before = self._last.get(row.session)
        if before is None and row.parent:
            self._children.setdefault(row.parent, set()).add(row.session)
            before = self._last.get(row.parent)
        self._last[row.session] = answer
        if before is None:
            return row
        if before.ended > begun:  # the request did not wait for the previous one
            delay_s = (begun - before.row.time) / 1000.0
            return row._replace(time=UNTIMED, alongside=(before.row.call,), delay_s=delay_s)
        waits_for = [before, *self._joined(row.session, begun)]
        delay_s = (begun - max(one.ended for one in waits_for)) / 1000.0
        names = tuple(dict.fromkeys(one.row.call for one in waits_for))
        return row._replace(time=UNTIMED, after=names, delay_s=delay_s)

    def _joined(self, session: str, begun: float) -> list[_Answer]:
        """Returns the last requests of the sub-agents that have ended, each of them once."""
        children = self._children.get(session, set())
        ended = sorted(one for one in children if self._last[one].ended <= begun)
        children.difference_update(ended)
        return [self._last[one] for one in ended]


def _tool(request: _Request) -> str:
    finish = request.finish_reason_metadata
    calls = finish.tool_calls if finish is not None else None
    return (calls[0].name or "") if calls else ""
