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

Seed-OSS, MiniMax M2 and DeepSeek from V3.2 on have other names for the tags of the first form. A
value that is text stands as it is, and others as JSON: the schema of the function tells them apart,
and DeepSeek an attribute of the tag. The arguments are passed on as the JSON that they mean.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.pythonic_calls import NO_LITERAL, literal
from moonpool.api.output_text.said import plain
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.types import MALFORMED

LONGEST_NAME_CHARS = 256
_HEADER_END = Marks((">",))
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TRUTHS = {"true": True, "false": False}
_NO_TEXT = {"integer", "number", "boolean", "object", "array", "null"}


class FunctionTags(NamedTuple):
    """Tags of the first form. The opening ones end before the name."""

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    wraps_values: bool = True  # a value stands on lines of its own

    @property
    def texts(self) -> tuple[str, ...]:
        return self.function, self.function_end, self.parameter, self.parameter_end

    def seen(self, signs: MarkSigns) -> FunctionTags:
        """Returns the tags as a reader sees them."""
        return self._replace(
            function=signs.of(self.function),
            function_end=signs.of(self.function_end),
            parameter=signs.of(self.parameter),
            parameter_end=signs.of(self.parameter_end),
        )


def read_function(
    source: TextSource, calls: CallWriter, tags: FunctionTags, ends: Marks
) -> Steps[bool]:
    """Reads one call of the first form, from behind its opening tag on.

    Returns False if there is none. `ends`: marks that end a call which
    lacks its own closing tags.
    """
    header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
    name = None if header is None else header[0].partition('"')[0].strip()
    if name is None or not calls.knows(name):
        return False
    writer = _ArgumentWriter(calls, name, tags.wraps_values)
    value_ends = Marks((tags.parameter_end, tags.parameter, tags.function_end, *ends.texts))
    tag = ""
    while True:
        if tag != tags.parameter:
            yield from source.skip_space()
            tag = yield from source.take(tags.parameter, tags.function_end)
        if tag == tags.function_end:
            return writer.end()
        if not tag:
            if source.end == "cut" and writer.has_begun:
                return True
            is_call = writer.has_begun or (yield from source.comes(_end(source, ends)))
            return is_call and writer.end()
        header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
        if header is None:
            return writer.has_begun
        tag = yield from _read_value(source, writer, header[0], value_ends, tags, ends)
        if not tag:
            return True  # the output has ended
        if tag in ends.texts:
            source.unread(len(tag))
            return writer.end()


def _read_value(
    source: TextSource,
    writer: _ArgumentWriter,
    header: str,
    value_ends: Marks,
    tags: FunctionTags,
    ends: Marks,
) -> Steps[str]:
    """Reads a value. Returns the tag behind it, or "" if the output ends first."""
    key, _, attributes = header.partition('"')
    writer.begin(key.strip(), attributes)
    while True:
        tag = yield from source.until(value_ends, writer.add, in_call=True)
        if tag == tags.function_end and not (yield from source.comes(_end(source, ends))):
            writer.add(tag)  # within the value
            continue
        writer.end_value(is_whole=tag != "" or source.end == "stop")
        if not tag and source.end == "stop":
            writer.end()
        return tag


def read_pairs(source: TextSource, calls: CallWriter, ends: Marks) -> Steps[bool]:
    """Reads one call of the second form, up to a mark of `ends`. Returns False if there is none."""
    found = yield from source.before(Marks((_KEY, *ends.texts)), LONGEST_NAME_CHARS)
    name = None if found is None else found[0].strip()
    if found is None or name is None or not calls.knows(name):
        return False
    writer = _ArgumentWriter(calls, name, wraps_values=False)
    tag = found[1]
    value_ends = Marks((_VALUE_END, *ends.texts))
    while tag == _KEY:
        key = yield from source.before(Marks((_KEY_END,)), LONGEST_NAME_CHARS)
        yield from source.skip_space()
        if key is None or not (yield from source.take(_VALUE)):
            return writer.has_begun
        writer.begin(key[0].strip(), "")
        tag = yield from source.until(value_ends, writer.add, in_call=True)
        writer.end_value(is_whole=tag != "" or source.end == "stop")
        if not tag and source.end == "cut":
            return True
        if tag == _VALUE_END and (yield from source.attempt(_take_key(source))):
            tag = _KEY
        elif tag == _VALUE_END and source.end == "cut":
            return True
    if tag in ends.texts:
        source.unread(len(tag))
    return writer.end()


def _take_key(source: TextSource) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(_KEY)))


def _end(source: TextSource, ends: Marks) -> Steps[bool]:
    """Whether one of the marks comes next, or the output ends by itself, after white space."""
    yield from source.skip_space()
    if (yield from source.take(*ends.texts)):
        return True
    return (yield from source.peek()) == "" and source.end == "stop"


class _ArgumentWriter:
    """Writes the arguments of one call as JSON. The call begins with its first argument."""

    def __init__(self, calls: CallWriter, name: str, wraps_values: bool) -> None:
        self.has_begun = False
        self._wraps_values = wraps_values
        self._calls = calls
        self._name = name
        properties = calls.functions[name].get("properties")
        self._schemas: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._num_arguments = 0
        self._schema: Any = None
        self._is_json = False
        self._streams = False  # the value is text in any case
        self._parts: list[str] = []
        self._is_first = True
        self._newline = ""  # at the end of what has come: it belongs to the tag if a tag follows

    def begin(self, key: str, attributes: str) -> None:
        """Begins a value. `attributes`: what else stands in its tag."""
        self._begin_call()
        opening = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._schema = self._schemas.get(key)
        self._is_json = 'string="false"' in attributes
        is_text = 'string="true"' in attributes or _kinds(self._schema) == {"string"}
        self._streams = is_text and not self._is_json
        self._parts, self._is_first, self._newline = [], True, ""
        opening += json.dumps(key, ensure_ascii=False) + ": "
        if self._streams:
            self._calls.add(opening + '"')
        else:
            self._parts.append(opening)

    def add(self, text: str) -> None:
        if not self._streams:
            self._parts.append(text)
            return
        if self._wraps_values:
            if self._is_first:
                text, self._is_first = text.removeprefix("\n"), False
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if text:
            self._calls.add(_escaped(text))

    def end_value(self, is_whole: bool) -> None:
        """`is_whole`: else a limit has cut it, and only text is taken in part."""
        if self._streams:
            if is_whole:
                self._calls.add('"')
        elif is_whole:
            opening, *texts = self._parts
            text = plain("".join(texts))
            if self._wraps_values:
                text = text.removeprefix("\n").removesuffix("\n")
            value = _value(text, self._schema, self._is_json)
            self._calls.add(opening + _json_of(value, text))

    def end(self) -> bool:
        self._begin_call()
        if self._num_arguments:
            self._calls.add("}")
        self._calls.end()
        return True

    def _begin_call(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._calls.begin(self._name)


def _json_of(value: Any, text: str) -> str:
    """The JSON of a value; of its text, if it nests too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, schema: Any, is_json: bool) -> Any:
    """Returns text where the schema allows it and nothing else fits, else what the JSON means."""
    kinds = _kinds(schema)
    if not is_json and "string" in kinds and not (kinds & _NO_TEXT and text.strip() == "null"):
        return text
    try:
        value = msgspec.json.decode(text)
    except MALFORMED:
        if "boolean" in kinds:
            return _TRUTHS.get(text.strip().lower(), text)
        return _python_value(text) if kinds & {"array", "object"} else text
    # Without a type, a number or a word may be meant as text.
    return value if is_json or kinds or isinstance(value, dict | list) else text


def _python_value(text: str) -> Any:
    """Returns what some templates write of lists and objects; else the text."""
    try:
        value = literal(text.strip())
        json.dumps(value)
    except NO_LITERAL:
        return text
    return value


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
