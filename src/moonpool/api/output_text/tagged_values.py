"""The values of tagged arguments. Text stands as it is and others as JSON, and the schema of the
function tells them apart. Where it does not, DeepSeek has an attribute of the tag."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.api.output_text.pythonic_calls import NO_LITERAL, literal
from moonpool.types import MALFORMED

Kinds = frozenset[str]
"""JSON's types that a schema allows; none if it does not say."""
_NO_TEXT = {"integer", "number", "boolean", "object", "array", "null"}
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?")
_MOST_DEPTH = 8
_LARGEST_EXACT = 2.0**53


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """Returns the types that a schema names, also as alternatives, by its values or by reference to
    a definition in `root`. A client may have written anything."""
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return frozenset()
    own = schema.get("type")
    found = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    values = schema.get("enum")
    values = values if isinstance(values, list) else []
    if "const" in schema:
        values = [*values, schema["const"]]
    if not found:
        found = {_KIND_OF.get(type(value), "object") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found |= kinds_of(part, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found |= kinds_of(_definition(reference, root), root, depth + 1)
    return frozenset(found)


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def value_as_json(text: str, kinds: Kinds, is_json: bool) -> str:
    """Returns the JSON of a value. `is_json`: the tag says that the value is not text."""
    value = _value(text, kinds, is_json)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (RecursionError, ValueError):  # it nests too deeply, or is not a number of JSON
        return json.dumps(text, ensure_ascii=False)


def _value(text: str, kinds: Kinds, is_json: bool) -> Any:
    """Returns text where the schema allows it and nothing else fits, else what the JSON means."""
    word = text.strip()
    if word == "null" and (is_json or kinds & _NO_TEXT):
        return None
    if "integer" in kinds and _INTEGER.fullmatch(word):
        return int(word)
    if "number" in kinds and _NUMBER.fullmatch(word) and math.isfinite(number := float(word)):
        is_whole = number.is_integer() and abs(number) < _LARGEST_EXACT
        return int(number) if is_whole else number
    if "boolean" in kinds and word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
    try:
        value = msgspec.json.decode(text)
    except MALFORMED:
        return _python_value(word, text) if kinds & {"array", "object"} else text
    if isinstance(value, dict | list):
        wanted = "object" if isinstance(value, dict) else "array"
        return value if is_json or wanted in kinds or "string" not in kinds else text
    if is_json:
        return value if isinstance(value, str) or "string" not in kinds else text
    # Without a type, a number or a word may be meant as text.
    return text if not kinds or "string" in kinds else value


def _python_value(word: str, text: str) -> Any:
    """Returns what some templates write of lists and objects; else the text."""
    try:
        value = literal(word)
    except NO_LITERAL:
        return text
    return value if isinstance(value, dict | list) else text
