"""Describes what is wrong with a line of JSON that could not be decoded, in terms of its format's
fields."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.trace.json_log import json_object
from moonpool.trace.row import MAX_LENGTH_TOKENS, damage

_NAMES = ("tenant", "slo_class", "tool", "text_input")
_TIMES = ("timestamp", "delay", "tool_wait_ms")


def wrong_ids(num_ids: int, input_length: int, block_tokens: int) -> str:
    """The text of the error about a row whose prompt needs another number of block ids."""
    expected = -(-input_length // block_tokens)
    return (
        f"{num_ids} hash_ids for input_length {input_length}; with one per {block_tokens} tokens"
        f" there must be {expected}"
    )


def explain(
    line: bytes, shape: type, name: str, error: Exception, required: Sequence[str] = ()
) -> str:
    """Returns what is wrong with a line that does not fit the struct `shape`. `required`: the
    fields that every row of the format `name` has."""
    found = damage(line)
    if found is not None:
        return found
    fields = json_object(line)
    if line.lstrip().startswith(b"["):
        return "this is a JSON list, not one JSON object per line; convert it by `jq -c '.[]' FILE`"
    if fields is None:
        more = "; put each object on one line by `jq -c . FILE`" if line.strip() == b"{" else ""
        return f"this line is not one JSON object ({error}){more}"
    names = [field.encode_name for field in msgspec.structs.fields(shape)]
    missing = [field for field in required if field not in fields]
    for field in fields:
        near = difflib.get_close_matches(field, missing, n=1) if field not in names else ()
        if near:
            return f"unknown field {field!r}; did you mean {near[0]}? rename it"
    if missing:
        them = "it" if len(missing) == 1 else "them"
        lacks = " and no ".join(missing)
        return f"this row has no {lacks}; every row of a {name} trace needs {them}"
    for field in (*_TIMES, "input_length", "output_length", *_NAMES, "priority"):
        if field in names and field in fields:
            is_optional = fields[field] is None and field not in required
            problem = None if is_optional else _problem(field, fields[field])
            if problem is not None:
                return problem
    if not isinstance(fields.get("hash_ids") or [], list):
        return "hash_ids is not a list; it must be a list of integers"
    return f"hash_ids or another field has a wrong value: {error}"


def _problem(field: str, value: Any) -> str | None:
    shown = repr(value)[:40]
    if field in _TIMES:
        if field == "timestamp" and isinstance(value, str):
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            return f"{field} is {shown}; it must be a finite number, 0 or more"
    elif field in _NAMES:
        return None if isinstance(value, str) else f"{field} is {shown}; it must be a name"
    elif isinstance(value, bool) or not _is_whole(value):
        return f"{field} is {shown}; it must be an integer"
    elif field == "priority":
        if not -(2**31) <= value < 2**31:
            return f"priority is {shown}; it must be between -2147483648 and 2147483647"
    elif not 0 <= value <= MAX_LENGTH_TOKENS:
        return f"{field} is {shown}; it must be between 0 and {MAX_LENGTH_TOKENS}"
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
