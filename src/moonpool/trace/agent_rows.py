"""Rows of agents in Mooncake's form, as AIPerf and Dynamo write them: one call per line.

AIPerf's rows name their `session_id` and the `delay` after the answer before. A prompt is an
`input_length`, a `text_input`, `messages`, or a whole `payload` of an API. Without `hash_ids`, a
row's `input_length` or `text_input` is added to the preceding prompt and answer; `messages` are the
whole history, unless `message_mode` is "delta".

Dynamo's rows have a `request_id` and the whole prompt, and name the calls that they `wait_for`;
after these, `delay` and `tool_wait_ms` pass. The calls that a row waits for may stand in later
lines.

Times are milliseconds, or dates. Fields that are null count as absent.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from moonpool.trace.programs import SESSION_BLOCK_TOKENS, block_id
from moonpool.trace.prompt_texts import (
    KnownPrompt,
    answer_tokens,
    body_prompt,
    message_text,
    text_prompt,
)
from moonpool.trace.row import MAX_LENGTH_TOKENS, UNTIMED, LineError, ParsedRow
from moonpool.trace.table import AZURE_UNITS_PER_S, DatedTime
from moonpool.trace.wrong_lines import explain, wrong_ids
from moonpool.types import MALFORMED

AGENT_FIELDS = frozenset(
    {"delay", "delay_ms", "wait_for", "request_id", "tool_wait_ms", "text_input"}
) | {"messages", "payload", "message_mode"}
"""A file that has one of these fields in its first rows is a trace of agents."""

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[float, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Name = str | int | None
_LARGEST_ID = 2**63 - 1


class AgentLine(msgspec.Struct, gc=False):
    """The fields of a row; the fields after `slo_class` are Dynamo's names of earlier ones."""

    input_length: _Length | None = None
    output_length: _Length | None = None
    text_input: str | None = None
    messages: list[Any] | None = None
    message_mode: str | None = None
    tools: list[Any] | None = None
    payload: dict[str, Any] | None = None
    timestamp: _Time | str | None = None
    hash_ids: tuple[int, ...] | None = None
    session_id: _Name = None
    request_id: _Name = None
    parent_session_id: _Name = None
    wait_for: tuple[str | int, ...] | None = None
    delay: _Time | None = None
    tool_wait_ms: _Time | None = None
    tool: str | None = None
    tenant: str | None = None
    priority: _Priority | None = None
    slo_class: str | None = None
    input_tokens: _Length | None = None
    output_tokens: _Length | None = None
    created_time: _Time | str | None = None
    delay_ms: _Time | None = None


class AgentParser:
    """Parses one row per line. A row without tokens is left to `CallOrder`, which knows what waits
    for it."""

    format = "mooncake"
    header_lines = 0
    units_per_s = 1000.0

    def __init__(self, block_tokens: int, ignored: tuple[str, ...]) -> None:
        """`block_tokens` is the block size, or 0 for a file without hashes."""
        self._has_hashes = block_tokens > 0
        self.block_tokens = block_tokens or SESSION_BLOCK_TOKENS
        self.ignored = ignored
        self._decode = msgspec.json.Decoder(AgentLine).decode
        self._milliseconds = Milliseconds()

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            raise LineError(explain(line, AgentLine, "agent", error)) from None
        prompt, adds = self._prompt(row)
        delay = row.delay_ms if row.delay is None else row.delay
        waits = delay is not None or row.tool_wait_ms is not None
        delay_s = ((delay or 0.0) + (row.tool_wait_ms or 0.0)) / 1000.0
        return ParsedRow(
            self._time(row),
            prompt.num_tokens,
            _answer(row),
            prompt.block_ids,
            name_of(row.session_id),
            row.tenant or "",
            row.priority or 0,
            call=name_of(row.request_id),
            after=tuple(name_of(call) for call in row.wait_for or ()),
            delay_s=delay_s if waits else None,
            parent=name_of(row.parent_session_id),
            tool=row.tool or "",
            adds=adds,
            slo_class=row.slo_class or "",
        )

    def _time(self, row: AgentLine) -> float:
        time = row.created_time if row.timestamp is None else row.timestamp
        return UNTIMED if time is None else self._milliseconds(time)

    def _prompt(self, row: AgentLine) -> tuple[KnownPrompt, bool]:
        """The prompt, with its blocks as far as they are known, and whether it is only what the
        row adds to its session."""
        size, adds = self.block_tokens, row.request_id is None
        length = row.input_tokens if row.input_length is None else row.input_length
        if length is not None:
            num_input = whole("input_length", length)
            if row.hash_ids:
                return KnownPrompt(num_input, self._checked(row.hash_ids, num_input)), False
            return KnownPrompt(num_input, _own_blocks(row, num_input, size)), adds
        if row.hash_ids:
            raise LineError("this row has hash_ids, but no input_length")
        if row.text_input is not None:
            return text_prompt(row.text_input, size), adds
        if row.messages is not None:
            text = message_text(row.messages, row.tools)
            return text_prompt(text, size), row.message_mode == "delta"
        if row.payload is not None:
            return body_prompt(row.payload, size), False
        raise LineError("this row has no input_length, text_input, messages or payload")

    def _checked(self, ids: tuple[int, ...], num_input: int) -> tuple[int, ...]:
        if not self._has_hashes:
            raise LineError(
                "this row has hash_ids, and none of the first rows has, which tell the size of a"
                " block; put a row with hash_ids first"
            )
        if len(ids) != -(-num_input // self.block_tokens):
            raise LineError(wrong_ids(len(ids), num_input, self.block_tokens))
        return plain_ids(ids)


class Milliseconds:
    """Times of rows in milliseconds: numbers as they are, dates since 1970."""

    def __init__(self) -> None:
        self._dated = DatedTime()

    def __call__(self, time: float | str) -> float:
        """Raises LineError for a text that is not a date."""
        if not isinstance(time, str):
            return time
        return self._dated(time.strip().encode()) * 1000 / AZURE_UNITS_PER_S


def name_of(value: str | int | None) -> str:
    """A name as text; "" means none."""
    return "" if value is None else str(value)


def whole(field: str, value: float) -> int:
    """Raises LineError for a length that is not a whole number."""
    if not value.is_integer():
        raise LineError(f"{field} is {value!r}; it must be an integer")
    return int(value)


def plain_ids(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of blocks that fit into 63 bits: signed and unsigned hashes of 64 bits are renamed."""
    if not ids or (min(ids) >= 0 and max(ids) <= _LARGEST_ID):
        return ids
    return tuple(i if 0 <= i <= _LARGEST_ID else block_id(b"%d" % i) for i in ids)


def _answer(row: AgentLine) -> int:
    length = row.output_tokens if row.output_length is None else row.output_length
    if length is None and row.payload is not None:
        length = answer_tokens(row.payload)
    return 1 if length is None else whole("output_length", length)


def _own_blocks(row: AgentLine, num_input: int, block_tokens: int) -> tuple[int, ...]:
    """Returns block ids for a prompt of which only the length is known; prompts of one session
    begin alike. Other rows get no ids here: the text that a row adds to its session gets them
    later, and a standalone row shares no blocks."""
    session = name_of(row.session_id)
    if not session or row.request_id is None:
        return ()
    return tuple(block_id(f"{session}//{i}".encode()) for i in range(-(-num_input // block_tokens)))
