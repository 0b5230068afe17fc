"""Traces of Mooncake and Alibaba Bailian: one JSON object per line, with block hashes.

Times are milliseconds in Mooncake's files and seconds in Bailian's. A Mooncake file whose first
times have fractions, as some tools write them, is in seconds. Blocks of a Mooncake file have 512
tokens unless its first rows show another size. Rows of both may name a `tenant`, whose blocks
nobody else shares, a `priority`, of which a lower one is served first, and an `slo_class`, whose
service levels the configuration gives (`slo.classes`). Unknown fields are ignored, misspelt ones
are errors. `write_trace` writes Mooncake's format.

Rows of agents are in aiperf's or in Dynamo's form of Mooncake's: `session_id` and `delay`, or
`request_id`, `wait_for`, `delay` and `tool_wait_ms`, all times in milliseconds. Such a row starts
when those before it have ended. Without `hash_ids`, a row of a session has the part that it adds to
its prompt; `text_input` in place of `input_length` is the text itself.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from moonpool.trace.corpora import SpansParser, WekaParser, is_spans, is_weka
from moonpool.trace.json_log import JsonLogParser, json_object
from moonpool.trace.programs import SESSION_BLOCK_TOKENS, block_id, text_blocks
from moonpool.trace.row import (
    MAX_LENGTH_TOKENS,
    UNTIMED,
    LineError,
    ParsedRow,
    TraceRow,
    damage,
)
from moonpool.types import MALFORMED

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
_RealLength = Annotated[float, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...] | None = None
    session_id: str | int = ""
    tenant: str = ""
    priority: _Priority = 0
    slo_class: str = ""


class _AgentLine(msgspec.Struct, gc=False):
    input_length: _RealLength | None = None
    output_length: _RealLength | None = None
    text_input: str | None = None
    timestamp: _Time | None = None
    hash_ids: tuple[_HashId, ...] | None = None
    session_id: str | int | None = None
    request_id: str | int | None = None
    parent_session_id: str | int | None = None
    wait_for: tuple[str | int, ...] | None = None
    delay: _Time | None = None
    tool_wait_ms: _Time | None = None
    tool: str = ""
    tenant: str = ""
    priority: _Priority = 0
    slo_class: str = ""


class _BailianLine(msgspec.Struct, gc=False):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...]
    chat_id: str | int = ""
    tenant: str = ""
    priority: _Priority = 0
    slo_class: str = ""


_REQUIRED = {
    "mooncake": ("timestamp", "input_length", "output_length"),
    "bailian": ("timestamp", "input_length", "output_length", "hash_ids"),
}
_AGENT_FIELDS = frozenset({"delay", "wait_for", "request_id", "tool_wait_ms", "text_input"})
"""A file with one of them in its first rows is of agents."""
_EXPECTED = frozenset({"parent_chat_id", "type", "turn", "delay", "messages", "payload"}) | {
    *("branches", "prefix_reset", "tool_events"),
}
"""Fields of these formats that the parsers do not use."""


class JsonlParser:
    """Mooncake's format. Either all rows have hashes, or none has."""

    format = "mooncake"
    header_lines = 0

    def __init__(self, block_tokens: int, units_per_s: float, ignored: tuple[str, ...]) -> None:
        """`block_tokens` is the block size, 0 for a file without hashes."""
        self.block_tokens = block_tokens
        self.units_per_s = units_per_s
        self.ignored = ignored
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format, and for hash ids that only some
        rows have or whose number does not fit the input."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            raise LineError(_explain(line, _MooncakeLine, self.format, error)) from None
        ids = row.hash_ids
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
        elif len(ids) != -(-row.input_length // self.block_tokens):
            raise LineError(_wrong_ids(len(ids), row.input_length, self.block_tokens))
        if row.input_length == 0 or row.output_length == 0:
            return None
        return ParsedRow(
            row.timestamp,
            row.input_length,
            row.output_length,
            ids,
            str(row.session_id),
            row.tenant,
            row.priority,
            slo_class=row.slo_class,
        )


class AgentParser:
    """Mooncake's rows of agents, in aiperf's form or in Dynamo's. Times are milliseconds."""

    format = "mooncake"
    header_lines = 0
    units_per_s = 1000.0

    def __init__(self, block_tokens: int, ignored: tuple[str, ...]) -> None:
        """`block_tokens` is the block size, 0 for a file without hashes."""
        self._has_hashes = block_tokens > 0
        self.block_tokens = block_tokens or SESSION_BLOCK_TOKENS
        self.ignored = ignored
        self._decode = msgspec.json.Decoder(_AgentLine).decode

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a line that does not fit the format."""
        try:
            row = self._decode(line)
        except MALFORMED as error:
            raise LineError(_explain(line, _AgentLine, "agent", error)) from None
        num_input, ids = self._prompt(row)
        output_length = 1.0 if row.output_length is None else row.output_length
        num_output = _whole("output_length", output_length)
        if num_input == 0 or num_output == 0:
            return None
        waits = row.delay is not None or row.tool_wait_ms is not None
        delay_s = ((row.delay or 0.0) + (row.tool_wait_ms or 0.0)) / 1000.0
        return ParsedRow(
            UNTIMED if row.timestamp is None else row.timestamp,
            num_input,
            num_output,
            ids,
            _name(row.session_id),
            row.tenant,
            row.priority,
            call=_name(row.request_id),
            after=tuple(_name(call) for call in row.wait_for or ()),
            delay_s=delay_s if waits else None,
            parent=_name(row.parent_session_id),
            tool=row.tool,
            adds=not self._has_hashes,
            slo_class=row.slo_class,
        )

    def _prompt(self, row: _AgentLine) -> tuple[int, tuple[int, ...]]:
        """The tokens of the prompt, and the ids of its blocks as far as they are known."""
        ids, text = row.hash_ids or (), row.text_input
        if self._has_hashes:
            if row.hash_ids is None or row.input_length is None:
                raise LineError(
                    "this row has no hash_ids or no input_length, the first rows have both"
                )
            num_input = _whole("input_length", row.input_length)
            if len(ids) != -(-num_input // self.block_tokens):
                raise LineError(_wrong_ids(len(ids), num_input, self.block_tokens))
            return num_input, ids
        if ids:
            raise LineError("this row has hash_ids, the first rows have none")
        if row.input_length is not None:
            num_input = _whole("input_length", row.input_length)
            own = f"{_name(row.session_id)}/{_name(row.request_id)}"
            if not row.session_id:  # else the session names them
                ids = tuple(
                    block_id(f"{own}/{i}".encode())
                    for i in range(-(-num_input // SESSION_BLOCK_TOKENS))
                )
            return num_input, ids
        if text is None:
            raise LineError("this row has neither input_length nor text_input")
        ids, num_input = text_blocks(text)
        return num_input, ids


def _name(value: str | int | None) -> str:
    return "" if value is None else str(value)


def _whole(field: str, value: float) -> int:
    """Raises LineError for a length that is no whole number."""
    if not value.is_integer():
        raise LineError(f"{field} is {value!r}; it must be an integer")
    return int(value)


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
            raise LineError(_explain(line, _BailianLine, self.format, error)) from None
        # Some of the files leave out the last, partial block.
        num_full = row.input_length // BAILIAN_BLOCK_TOKENS
        if not num_full <= len(row.hash_ids) <= -(-row.input_length // BAILIAN_BLOCK_TOKENS):
            raise LineError(_wrong_ids(len(row.hash_ids), row.input_length, BAILIAN_BLOCK_TOKENS))
        if row.input_length == 0 or row.output_length == 0:
            return None
        return ParsedRow(
            row.timestamp,
            row.input_length,
            row.output_length,
            row.hash_ids,
            str(row.chat_id),
            row.tenant,
            row.priority,
            slo_class=row.slo_class,
        )


def jsonl_parser(
    first_lines: list[bytes], name: str
) -> JsonlParser | AgentParser | BailianParser | JsonLogParser | WekaParser | SpansParser:
    """The parser for a file with these first lines. `name` is "mooncake", "bailian", "log" or
    "auto"."""
    rows = [json_object(line) or {} for line in first_lines]
    first = next(filter(None, rows), {})
    if name == "auto" and is_weka(first):
        return WekaParser(first)
    if name == "auto" and is_spans(first):
        return SpansParser()
    if name == "log" or (name == "auto" and not _is_published(first)):
        return JsonLogParser(first_lines)
    if name == "bailian" or (name == "auto" and "chat_id" in rows[0]):
        return BailianParser(_ignored(_BailianLine, rows[0]))
    if any(_AGENT_FIELDS & row.keys() for row in rows) or _has_untimed_session(rows):
        hashed = any(row.get("hash_ids") is not None for row in rows)
        return AgentParser(_block_tokens(rows) if hashed else 0, _ignored(_AgentLine, rows[0]))
    times = [row.get("timestamp") for row in rows]
    in_seconds = any(isinstance(time, float) and not time.is_integer() for time in times)
    block_tokens = 0 if rows[0].get("hash_ids") is None else _block_tokens(rows)
    units_per_s = 1.0 if in_seconds else 1000.0
    return JsonlParser(block_tokens, units_per_s, _ignored(_MooncakeLine, rows[0]))


def _is_published(row: dict[str, Any]) -> bool:
    """A line that is no object is explained in terms of that format, too. A line that is no object
    is explained by that format, too."""
    own = ("input_length", "output_length", "hash_ids", "text_input")
    return not row or any(
        field in own or difflib.get_close_matches(field, own[:2], n=1, cutoff=0.8) for field in row
    )


def _has_untimed_session(rows: list[dict[str, Any]]) -> bool:
    return any("session_id" in row and row.get("timestamp") is None for row in rows)


def _ignored(shape: type, first: dict[str, Any]) -> tuple[str, ...]:
    """The unused fields of the first row. Raises LineError for one that looks misspelt: optional
    fields may be absent, so a misspelt one would be ignored silently."""
    known = [field.encode_name for field in msgspec.structs.fields(shape)]
    absent = [field for field in known if field not in first]
    unknown = [field for field in first if field not in known and field not in _EXPECTED]
    for field in unknown:
        near = difflib.get_close_matches(field, absent, n=1)
        if near:
            raise LineError(f"unknown field {field!r}; did you mean {near[0]}? rename it")
    return tuple(unknown)


def _block_tokens(rows: list[dict[str, Any]]) -> int:
    """The block size: the power of two that fits all rows if there is exactly one, else 512."""
    least, most = 1, MAX_LENGTH_TOKENS
    for row in rows:
        tokens, ids = row.get("input_length"), row.get("hash_ids")
        if isinstance(tokens, float) and tokens.is_integer():
            tokens = int(tokens)
        if isinstance(tokens, int) and tokens > 0 and isinstance(ids, list) and ids:
            least = max(least, -(-tokens // len(ids)))
            most = min(most, (tokens - 1) // (len(ids) - 1) if len(ids) > 1 else most)
    fits = [2**power for power in range(30) if least <= 2**power <= most]
    return fits[0] if len(fits) == 1 else MOONCAKE_BLOCK_TOKENS


def _wrong_ids(num_ids: int, input_length: int, block_tokens: int) -> str:
    expected = -(-input_length // block_tokens)
    return (
        f"{num_ids} hash_ids for input_length {input_length}; with one per {block_tokens} tokens"
        f" there must be {expected}"
    )


def _explain(line: bytes, shape: type, name: str, error: Exception) -> str:
    """What is wrong with a line that could not be decoded, in terms of the format's fields."""
    found = damage(line)
    if found is not None:
        return found
    fields = json_object(line)
    if line.lstrip().startswith(b"["):
        return "this is a JSON list, not one JSON object per line; convert it by `jq -c '.[]' FILE`"
    if fields is None:
        more = "; put each object on one line by `jq -c . FILE`" if line.strip() == b"{" else ""
        return f"this line is not one JSON object ({error}){more}"
    known = msgspec.structs.fields(shape)
    names = [field.encode_name for field in known]
    missing = [field for field in _REQUIRED.get(name, ()) if field not in fields]
    for field in fields:
        near = difflib.get_close_matches(field, missing, n=1) if field not in names else ()
        if near:
            return f"unknown field {field!r}; did you mean {near[0]}? rename it"
    if missing:
        them = "it" if len(missing) == 1 else "them"
        lacks = " and no ".join(missing)
        return f"this row has no {lacks}; every row of a {name} trace needs {them}"
    checked: tuple[str, ...] = ("timestamp", "input_length", "output_length")
    if name == "agent":
        checked = tuple(
            field for field in (*checked, "delay", "tool_wait_ms") if fields.get(field) is not None
        )
    for field in (*checked, *sorted({"tenant", "slo_class", "priority"} & set(fields))):
        problem = _problem(field, fields[field])
        if problem is not None:
            return problem
    if not isinstance(fields.get("hash_ids", []), list):
        return "hash_ids is not a list; it must be a list of integers"
    return f"hash_ids or another field has a wrong value: {error}"


def _problem(field: str, value: Any) -> str | None:
    shown = repr(value)[:40]
    if field in ("timestamp", "delay", "tool_wait_ms"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            return f"{field} is {shown}; it must be a finite number, 0 or more"
    elif field in ("tenant", "slo_class"):
        return None if isinstance(value, str) else f"{field} is {shown}; it must be a name"
    elif not isinstance(value, int) or isinstance(value, bool):
        return f"{field} is {shown}; it must be an integer"
    elif field == "priority":
        if not -(2**31) <= value < 2**31:
            return f"priority is {shown}; it must be between -2147483648 and 2147483647"
    elif not 0 <= value <= MAX_LENGTH_TOKENS:
        return f"{field} is {shown}; it must be between 0 and {MAX_LENGTH_TOKENS}"
    return None


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
    """Writes rows as Mooncake's format, times in whole milliseconds. Returns their number.

    Hash ids must be those of blocks of 512 tokens, or none. The file appears under its name only
    when it is complete. Raises OSError.
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
    """A row as a line. One that waits for others has a delay in place of a time."""
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
