"""Tool calls whose arguments stand between tags, one by one.

Qwen3-Coder and Qwen3.5 write

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

and GLM-4.5 and later

    NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>

A value that is text stands as it is, and others as JSON: the schema of the function tells them
apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from moonpool.types import MALFORMED

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL
)
_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)\s*", re.DOTALL
)
CallEnd = Literal["closed", "open", "cut"]
"""What ended a call: its tag, the model without one, or a limit of the output."""
_ENDS = {"open": ("</function>", "</arg_value>"), "cut": ("</function>",)}
_TRUTHS = {"true": True, "false": False}
_NO_TEXT = {"integer", "number", "boolean", "object", "array", "null"}


def read_tagged_call(
    source: str, functions: Mapping[str, Mapping[str, Any]], end: CallEnd = "closed"
) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of one call; None if the text is something else.

    functions: the schema of each function's parameters. No argument is taken in part: without a tag
    behind it, a call must end with a closing tag of its own."""
    if end != "closed" and not source.rstrip().endswith(_ENDS[end]):
        return None
    found = _FUNCTION.fullmatch(source)
    if found is not None:
        name, pairs = found[1], _all(_PARAMETER, found[2].strip())
    else:
        name, mark, rest = source.partition("<arg_key>")
        name, pairs = name.strip(), _all(_PAIR, mark + rest)
    if pairs is None or name not in functions:
        return None
    properties = functions[name].get("properties")
    kinds = properties if isinstance(properties, dict) else {}
    return name, {key.strip(): _value(text, kinds.get(key.strip())) for key, text in pairs}


def _all(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """Returns the pairs of which the text consists; None if it has anything else."""
    pairs, at = list[tuple[str, str]](), 0
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            return None
        pairs.append((found[1], found[2]))
        at = found.end()
    return pairs


def _value(text: str, schema: Any) -> Any:
    """Returns text where the schema allows it and nothing else fits, else what the JSON means."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema)
    if "string" in kinds and not (kinds & _NO_TEXT and text.strip() == "null"):
        return text
    try:
        value = msgspec.json.decode(text)
    except MALFORMED:
        return _TRUTHS.get(text.strip().lower(), text) if "boolean" in kinds else text
    # Without a type, a number or a word may be meant as text.
    return value if kinds or isinstance(value, dict | list) else text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, also as alternatives; a client may have written anything."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type")
    found = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found |= _kinds({"type": part.get("type")}) if isinstance(part, dict) else set()
    return found
