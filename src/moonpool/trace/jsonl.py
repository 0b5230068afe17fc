"""Mooncake's and Alibaba Bailian's traces: one JSON object per line, with a prompt's block hashes.

Owns the fields and their checks. Times are read as the formats define them: milliseconds in
Mooncake's files, seconds in Bailian's, and seconds in a Mooncake file whose first times have
fractions (some tools write those).
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import msgspec

from moonpool.trace.lines import damage
from moonpool.trace.parsed import LineError, Parsed
from moonpool.trace.row import MAX_LENGTH_TOKENS

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _MooncakeLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...] | None = None
    session_id: str | int = ""
    # Written by some tools that share the format; read by nothing here.
    delay: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()


class _BailianLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    timestamp: _Time
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...]
    chat_id: str | int = ""
    parent_chat_id: str | int | None = None
    type: msgspec.Raw = msgspec.Raw()
    turn: msgspec.Raw = msgspec.Raw()


_REQUIRED = {
    "mooncake": ("timestamp", "input_length", "output_length"),
    "bailian": ("timestamp", "input_length", "output_length", "hash_ids"),
}


class JsonlParser:
    """Mooncake's format. All rows have hashes, or none has."""

    format = "mooncake"
    header_lines = 0

    def __init__(self, has_hashes: bool, units_per_s: float) -> None:
        self.block_tokens = MOONCAKE_BLOCK_TOKENS if has_hashes else 0
        self.units_per_s = units_per_s
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode

    def parse(self, line: bytes) -> Parsed | None:
        try:
            row = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(_explain(line, _MooncakeLine, self.format, error)) from None
        ids = row.hash_ids
        if self.block_tokens == 0:
            if ids is not None:
                raise LineError("hash_ids in this row, but none in the first; all rows or none")
            ids = ()
        elif ids is None:
            raise LineError("no hash_ids in this row, but in the first; all rows or none")
        elif len(ids) != -(-row.input_length // MOONCAKE_BLOCK_TOKENS):
            raise LineError(_wrong_ids(len(ids), row.input_length, MOONCAKE_BLOCK_TOKENS))
        if row.input_length == 0 or row.output_length == 0:
            return None
        return Parsed(row.timestamp, row.input_length, row.output_length, ids, str(row.session_id))


class BailianParser:
    """Alibaba Bailian's format: seconds, blocks of 16 tokens, chats that name their parents."""

    format = "bailian"
    header_lines = 0
    block_tokens = BAILIAN_BLOCK_TOKENS
    units_per_s = 1.0

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_BailianLine).decode

    def parse(self, line: bytes) -> Parsed | None:
        try:
            row = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(_explain(line, _BailianLine, self.format, error)) from None
        # The last, partial block is left out in some of the files.
        num_full = row.input_length // BAILIAN_BLOCK_TOKENS
        if not num_full <= len(row.hash_ids) <= -(-row.input_length // BAILIAN_BLOCK_TOKENS):
            raise LineError(_wrong_ids(len(row.hash_ids), row.input_length, BAILIAN_BLOCK_TOKENS))
        if row.input_length == 0 or row.output_length == 0:
            return None
        chat = str(row.chat_id)
        return Parsed(row.timestamp, row.input_length, row.output_length, row.hash_ids, chat)


def jsonl_parser(first_lines: list[bytes], name: str) -> JsonlParser | BailianParser:
    """The parser for a file that begins so; `name` is "mooncake", "bailian" or "auto"."""
    fields = _object(first_lines[0]) or {}
    if name == "bailian" or (name == "auto" and "chat_id" in fields):
        return BailianParser()
    times = [(_object(line) or {}).get("timestamp") for line in first_lines]
    in_seconds = any(isinstance(time, float) and not time.is_integer() for time in times)
    return JsonlParser(fields.get("hash_ids") is not None, 1.0 if in_seconds else 1000.0)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _wrong_ids(num_ids: int, input_length: int, block_tokens: int) -> str:
    expected = -(-input_length // block_tokens)
    return (
        f"{num_ids} hash_ids for input_length {input_length}; one per {block_tokens} tokens"
        f" makes {expected}"
    )


def _explain(line: bytes, shape: type, name: str, error: Exception) -> str:
    """Only for lines that could not be decoded: what is wrong, in the words of the format."""
    found = damage(line)
    if found is not None:
        return found
    fields = _object(line)
    if fields is None:
        return f"not one JSON object per line ({error})"
    known = msgspec.structs.fields(shape)
    names = [field.encode_name for field in known]
    for field in fields:
        if field not in names:
            near = difflib.get_close_matches(field, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
            return f"unknown field {field!r}{hint}"
    missing = [field for field in _REQUIRED[name] if field not in fields]
    if missing:
        return f"no {' and no '.join(missing)} in this row; every row of a {name} trace needs them"
    for field in ("timestamp", "input_length", "output_length"):
        problem = _problem(field, fields[field])
        if problem is not None:
            return problem
    if not isinstance(fields.get("hash_ids"), list):
        return "hash_ids is no list of integers"
    return f"hash_ids or another field does not fit: {error}"


def _problem(field: str, value: Any) -> str | None:
    shown = repr(value)[:40]
    if field == "timestamp":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            return f"timestamp is {shown}; it must be a finite number, 0 or more"
    elif not isinstance(value, int) or isinstance(value, bool):
        return f"{field} is {shown}; it must be an integer"
    elif not 0 <= value <= MAX_LENGTH_TOKENS:
        return f"{field} is {shown}; it must lie between 0 and {MAX_LENGTH_TOKENS}"
    return None
