"""Traces of Mooncake and Alibaba Bailian: one JSON object per line, with block hashes.

Times are milliseconds in Mooncake's files and seconds in Bailian's. A Mooncake file whose first
times have fractions, as some tools write them, is in seconds. Blocks of a Mooncake file have 512
tokens unless its first rows show another size. Rows of both may name a `tenant`, whose blocks
nobody else shares, a `priority`, of which a lower one is served first, and an `slo_class`, whose
service levels the configuration gives (`slo.classes`). Unknown fields are ignored, misspelt ones
are errors. `write_trace` writes Mooncake's format.

Rows of agents have other forms (`agent_rows`, `agent_graphs`, `corpora`); `jsonl_parser` decides by
the first rows which form a file has.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from moonpool.trace.agent_graphs import GraphParser, is_graph
from moonpool.trace.agent_rows import (
    AGENT_FIELDS,
    AgentLine,
    AgentParser,
    Milliseconds,
    name_of,
    plain_ids,
    whole,
)
from moonpool.trace.corpora import (
    SpansParser,
    TurnsParser,
    WekaParser,
    is_spans,
    is_turns,
    is_weka,
)
from moonpool.trace.gathered.request_traces import RequestTrace, is_request_trace
from moonpool.trace.gathered.rows import Gatherer
from moonpool.trace.gathered.session_graphs import SessionGraph, is_session_graph
from moonpool.trace.gathered.span_exports import SpanExport, is_span_export
from moonpool.trace.json_log import JsonLogParser, is_request, json_object
from moonpool.trace.plain_prompts import PromptParser, ShareGptParser, is_prompt, is_sharegpt
from moonpool.trace.row import (
    MAX_LENGTH_TOKENS,
    LineError,
    ParsedRow,
    Parser,
    ProgramParser,
    TraceRow,
)
from moonpool.trace.wrong_lines import explain, wrong_ids
from moonpool.types import MALFORMED

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = (
    Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
    | Annotated[float, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
)
"""A length, which programs write as 12.0 where a column has gaps."""
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: _Time | str
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[int, ...] | None = None
    session_id: str | int | None = None
    tenant: str | None = None
    priority: _Priority | None = None
    tool: str | None = None
    slo_class: str | None = None


class _BailianLine(msgspec.Struct, gc=False):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[int, ...]
    chat_id: str | int | None = None
    tenant: str | None = None
    priority: _Priority | None = None
    slo_class: str | None = None


_REQUIRED = {
    "mooncake": ("timestamp", "input_length", "output_length"),
    "bailian": ("timestamp", "input_length", "output_length", "hash_ids"),
}
_EXPECTED = frozenset({"parent_chat_id", "type", "turn", "branches", "prefix_reset"}) | {
    *("tool_events", "extra", "context_mode", "strict_priority", "policy_class"),
}
"""Fields of these formats that the parsers do not use."""
_MISSPELT = 0.75
"""How alike an unknown field must be to a known one, to be taken for a misspelt one."""


class JsonlParser:
    """Mooncake's format. Either all rows have hashes, or none has."""

    format = "mooncake"
    header_lines = 0

    def __init__(self, block_tokens: int, units_per_s: float, ignored: tuple[str, ...]) -> None:
        """`block_tokens` is the block size, or 0 for a file without hashes."""
        self.block_tokens = block_tokens
        self.units_per_s = units_per_s
        self.ignored = ignored
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode
        self._milliseconds = Milliseconds()

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format, and for hash ids that only some
        rows have or whose number does not fit the input."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            why = explain(line, _MooncakeLine, self.format, error, _REQUIRED["mooncake"])
            raise LineError(why) from None
        ids, num_input = row.hash_ids, _whole("input_length", row.input_length)
        num_output = _whole("output_length", row.output_length)
        if self.block_tokens == 0:
            if ids is not None:
                raise LineError(
                    "this row has hash_ids, the first row has none; all rows need them or none"
                )
            ids = ()
        elif ids is None:
            raise LineError(
                "this row has no hash_ids, the first row has some; all rows need them or none"
            )
        elif len(ids) != -(-num_input // self.block_tokens):
            raise LineError(wrong_ids(len(ids), num_input, self.block_tokens))
        time = row.timestamp
        at = self._milliseconds(time) if isinstance(time, str) else time
        parsed = _parsed(row, at, num_input, num_output, ids, row.session_id)
        return parsed._replace(tool=row.tool) if parsed and row.tool else parsed


class BailianParser:
    """Alibaba Bailian's format: seconds, blocks of 16 tokens, chat ids."""

    format = "bailian"
    header_lines = 0
    block_tokens = BAILIAN_BLOCK_TOKENS
    units_per_s = 1.0

    def __init__(self, ignored: tuple[str, ...]) -> None:
        self.ignored = ignored
        self._decode = msgspec.json.Decoder(_BailianLine).decode

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format, and if the number of hash ids
        does not fit the input."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            why = explain(line, _BailianLine, self.format, error, _REQUIRED["bailian"])
            raise LineError(why) from None
        # Some of the files leave out the last, partial block.
        num_input = _whole("input_length", row.input_length)
        num_output = _whole("output_length", row.output_length)
        num_full = num_input // BAILIAN_BLOCK_TOKENS
        if not num_full <= len(row.hash_ids) <= -(-num_input // BAILIAN_BLOCK_TOKENS):
            raise LineError(wrong_ids(len(row.hash_ids), num_input, BAILIAN_BLOCK_TOKENS))
        return _parsed(row, row.timestamp, num_input, num_output, row.hash_ids, row.chat_id)


def _parsed(
    row: _MooncakeLine | _BailianLine,
    time: float,
    num_input: int,
    num_output: int,
    ids: tuple[int, ...],
    session: str | int | None,
) -> ParsedRow | None:
    """Returns the row of a request, or None if it has no prompt or no answer."""
    if num_input == 0 or num_output == 0:
        return None
    shape = time, num_input, num_output, plain_ids(ids), name_of(session)
    return ParsedRow(*shape, row.tenant or "", row.priority or 0, slo_class=row.slo_class or "")


def _whole(field: str, value: float) -> int:
    return value if type(value) is int else whole(field, value)


def jsonl_parser(first_lines: list[bytes], name: str) -> Parser | ProgramParser | Gatherer:
    """The parser for a file with these first lines. `name` is one of "mooncake", "bailian", "log"
    and "auto"."""
    rows = [json_object(line) or {} for line in first_lines]
    first = next(filter(None, rows), {})
    if name == "auto":
        found = _parser_of_programs(first)
        if found is not None:
            return found
    if name == "log" or (name == "auto" and not _is_published(first)):
        return JsonLogParser(first_lines)
    if name == "bailian" or (name == "auto" and "chat_id" in rows[0]):
        return BailianParser(_ignored(_BailianLine, rows[0]))
    has_hashes = any(row.get("hash_ids") for row in rows)
    if any(AGENT_FIELDS & row.keys() for row in rows) or _has_untimed_session(rows):
        return AgentParser(_block_tokens(rows) if has_hashes else 0, _ignored(AgentLine, rows[0]))
    times = [row.get("timestamp") for row in rows]
    in_seconds = any(isinstance(time, float) and not time.is_integer() for time in times)
    block_tokens = 0 if rows[0].get("hash_ids") is None else _block_tokens(rows)
    units_per_s = 1.0 if in_seconds else 1000.0
    return JsonlParser(block_tokens, units_per_s, _ignored(_MooncakeLine, rows[0]))


def _parser_of_programs(first: dict[str, Any]) -> Parser | ProgramParser | Gatherer | None:
    """The parser of a form that its first object alone tells."""
    if is_request_trace(first):
        return RequestTrace()
    if is_span_export(first):
        return SpanExport()
    if is_session_graph(first):
        return SessionGraph()
    if is_sharegpt(first):
        return ShareGptParser()
    if is_prompt(first):
        return PromptParser(first)
    if is_graph(first):
        return GraphParser(first)
    if is_weka(first):
        return WekaParser(first)
    if is_turns(first):
        return TurnsParser()
    return SpansParser() if is_spans(first) else None


def _is_published(row: dict[str, Any]) -> bool:
    """Whether a file's first object is a row of one of these formats, and not a line of a log. A
    line that is not an object is explained by these formats, too."""
    own = ("input_length", "output_length", "hash_ids", "text_input", "wait_for", "message_mode")
    if not row or any(
        field in own or difflib.get_close_matches(field, own[:2], n=1, cutoff=0.8) for field in row
    ):
        return True
    return ("messages" in row or "payload" in row) and not is_request(row)


def _has_untimed_session(rows: list[dict[str, Any]]) -> bool:
    return any("session_id" in row and row.get("timestamp") is None for row in rows)


def _ignored(shape: type, first: dict[str, Any]) -> tuple[str, ...]:
    """The unused fields of the first row. Raises LineError for a field that looks misspelt:
    optional fields may be absent, so a misspelt one would be ignored silently."""
    known = [field.encode_name for field in msgspec.structs.fields(shape)]
    absent = [field for field in known if field not in first]
    unknown = [field for field in first if field not in known and field not in _EXPECTED]
    for field in unknown:
        near = difflib.get_close_matches(field, absent, n=1, cutoff=_MISSPELT)
        if near:
            raise LineError(f"unknown field {field!r}; did you mean {near[0]}? rename it")
    return tuple(unknown)


def _block_tokens(rows: list[dict[str, Any]]) -> int:
    """Returns the block size: the power of two that fits all rows if there is exactly one, or else
    512."""
    least, most = 1, MAX_LENGTH_TOKENS
    for row in rows:
        tokens, ids = row.get("input_length", row.get("input_tokens")), row.get("hash_ids")
        if isinstance(tokens, float) and tokens.is_integer():
            tokens = int(tokens)
        if isinstance(tokens, int) and tokens > 0 and isinstance(ids, list) and ids:
            least = max(least, -(-tokens // len(ids)))
            most = min(most, (tokens - 1) // (len(ids) - 1) if len(ids) > 1 else most)
    fits = [2**power for power in range(30) if least <= 2**power <= most]
    return fits[0] if len(fits) == 1 else MOONCAKE_BLOCK_TOKENS


class _WrittenLine(msgspec.Struct, omit_defaults=True, gc=False):
    input_length: int
    output_length: int
    timestamp: int | None = None
    hash_ids: tuple[int, ...] | None = None
    tenant: str = ""
    priority: int = 0
    session_id: str = ""
    request_id: str = ""
    parent_session_id: str = ""
    wait_for: tuple[str, ...] = ()
    delay: float | None = None
    tool: str = ""
    slo_class: str = ""


def write_trace(rows: Iterable[TraceRow], path: Path) -> int:
    """Writes rows in Mooncake's format, with times in whole milliseconds. Returns their number.

    Hash ids must name blocks of 512 tokens, or be empty. The file appears under its name only when
    it is complete. Raises OSError.
    """
    partial = path.with_name(path.name + ".part")
    encode = msgspec.json.Encoder().encode
    num_rows = 0
    try:
        with partial.open("wb") as file:
            for row in rows:
                file.write(encode(_written(row)))
                file.write(b"\n")
                num_rows += 1
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


def _written(row: TraceRow) -> _WrittenLine:
    """A row as a line. A row that waits for others has a delay in place of a time."""
    is_call = bool(row.call)
    return _WrittenLine(
        row.input_tokens,
        row.output_tokens,
        None if row.after else round(row.arrived_s * 1000),
        row.hash_ids or None,
        row.tenant,
        row.priority,
        row.session if is_call else "",
        row.call,
        row.parent,
        row.after,
        round(row.delay_s * 1000, 3) if row.after else None,
        row.tool,
        row.slo_class,
    )
