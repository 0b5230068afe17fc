"""Tool calls whose arguments stand between tags, one by one.

Qwen3-Coder and Qwen3.5 write

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

and GLM-4.5 and later models write

    NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>

Seed-OSS, MiniMax M2 and DeepSeek from V3.2 on have other names for the tags of the first form.
Values may contain any of these tags: the text after a tag tells whether it is one. The arguments
are passed on as the JSON that they mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.pythonic_calls import NO_LITERAL, literal
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.types import MALFORMED

LONGEST_NAME_CHARS = 256
_HEADER_END = Marks((">",))
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class FunctionTags(NamedTuple):
    """The tags of the first form. The opening tags end before the name."""

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    wraps_values: bool = True  # whether a value stands on separate lines

    @property
    def texts(self) -> tuple[str, ...]:
        return self.function, self.function_end, self.parameter, self.parameter_end

    def seen(self, signs: MarkSigns) -> FunctionTags:
        """Returns the tags in the form in which a reader sees them."""
        return self._replace(
            function=signs.of(self.function),
            function_end=signs.of(self.function_end),
            parameter=signs.of(self.parameter),
            parameter_end=signs.of(self.parameter_end),
        )


def read_function(
    source: TextSource, calls: CallWriter, tags: FunctionTags, ends: Marks
) -> Steps[bool]:
    """Reads one call of the first form, starting after its opening tag.

    Returns False if no call follows. `ends`: marks that end a call which lacks its own closing
    tags.
    """
    header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
    name = None if header is None else header[0].partition('"')[0].strip()
    if name is None or not calls.knows(name):
        return False
    writer = _ArgumentWriter(calls, name, tags.wraps_values)
    value_ends = {
        tags.parameter_end: partial(
            _comes, source, (tags.parameter, tags.function_end, *ends.texts)
        ),
        tags.parameter: partial(_parameter_comes, source, writer),
        tags.function_end: partial(_comes, source, ends.texts),
        **dict.fromkeys(ends.texts, partial(_comes, source, ())),
    }
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
            is_call = writer.has_begun or (yield from source.comes(_comes(source, ends.texts)))
            return is_call and writer.end()
        header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
        if header is None:
            return writer.has_begun
        key, _, attributes = header[0].partition('"')
        writer.begin(key.strip(), attributes)
        tag = yield from _read_value(source, writer, value_ends)
        if not tag:
            return True  # the output has ended here
        if tag in ends.texts:
            source.unread(len(tag))
            return writer.end()


def read_pairs(source: TextSource, calls: CallWriter, ends: Marks) -> Steps[bool]:
    """Reads one call of the second form, up to a mark of `ends`. Returns False if no call
    follows."""
    found = yield from source.before(Marks((_KEY, *ends.texts)), LONGEST_NAME_CHARS)
    name = None if found is None else found[0].strip()
    if found is None or name is None or not calls.knows(name):
        return False
    writer = _ArgumentWriter(calls, name, wraps_values=False)
    tag = found[1]
    value_ends = {
        _VALUE_END: partial(_comes, source, (_KEY, *ends.texts)),
        **dict.fromkeys(ends.texts, partial(_comes, source, ())),
    }
    while tag == _KEY:
        key = yield from source.before(Marks((_KEY_END,)), LONGEST_NAME_CHARS)
        yield from source.skip_space()
        if key is None or not (yield from source.take(_VALUE)):
            return writer.has_begun
        writer.begin(key[0].strip(), "")
        tag = yield from _read_value(source, writer, value_ends)
        if not tag:
            return True  # the output has ended here
        if tag == _VALUE_END and (yield from source.attempt(_take_key(source))):
            tag = _KEY
    if tag in ends.texts:
        source.unread(len(tag))
    return writer.end()


def _take_key(source: TextSource) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(_KEY)))


def _read_value(
    source: TextSource, writer: _ArgumentWriter, ends: Mapping[str, Callable[[], Steps[bool]]]
) -> Steps[str]:
    """Reads a value. Returns the tag after the value, or "" if the output ends first.

    ends: tags that may end the value, and the steps that tell whether one does. A tag that does not
    end the value is part of the value.
    """
    marks = Marks(ends)
    while True:
        tag = yield from source.until(marks, writer.add, in_call=True)
        if tag and not (yield from source.comes(ends[tag]())) and source.end != "cut":
            writer.add(tag)
            continue
        # a further part of the output would decide whether the tag ends the value
        if tag and source.end == "cut":
            source.rest()
            tag = ""
        writer.end_value(is_whole=source.end != "cut")
        if not tag and source.end == "stop":
            writer.end()
        return tag


def _comes(source: TextSource, texts: Sequence[str]) -> Steps[bool]:
    """Whether one of these texts comes next, or the output ends without a limit, after white
    space."""
    yield from source.skip_space()
    if texts and (yield from source.take(*texts)):
        return True
    return (yield from source.peek()) == "" and source.end == "stop"


def _parameter_comes(source: TextSource, writer: _ArgumentWriter) -> Steps[bool]:
    """Whether the remaining part of a tag names a parameter that has no value yet."""
    header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
    return header is not None and writer.lacks(header[0].partition('"')[0].strip())


class _ArgumentWriter:
    """Writes the arguments of one call as JSON. A call begins with its first argument."""

    def __init__(self, calls: CallWriter, name: str, wraps_values: bool) -> None:
        self.has_begun = False
        self._wraps_values = wraps_values
        self._calls = calls
        self._name = name
        self._schema = calls.functions[name]
        properties = self._schema.get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._keys = set[str]()
        self._kinds: Kinds = frozenset()
        self._is_json = False
        self._streams = False  # whether the value is certainly a text
        self._parts: list[str] = []
        self._is_first = True
        # line break at the end of the text so far, which belongs to a tag if one follows
        self._newline = ""

    def lacks(self, key: str) -> bool:
        """Whether the function has this parameter, and the call has no value for it."""
        return key not in self._keys and (not self._properties or key in self._properties)

    def begin(self, key: str, attributes: str) -> None:
        """Begins the value of a parameter. `attributes`: the other attributes of its tag."""
        self._begin_call()
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        self._kinds = kinds_of(self._properties.get(key), self._schema)
        self._is_json = 'string="false"' in attributes
        is_text = not self._kinds and 'string="true"' in attributes
        self._streams = is_text or (self._kinds == {"string"} and not self._is_json)
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
        """`is_whole`: whether the value is complete; of a value that a limit has cut, only text is
        used."""
        if self._streams:
            if is_whole:
                self._calls.add('"')
        elif is_whole:
            opening, *texts = self._parts
            text = self._calls.spelled("".join(texts))
            if self._wraps_values:
                text = text.removeprefix("\n").removesuffix("\n")
            self._calls.add(opening + value_as_json(text, self._kinds, self._is_json))

    def end(self) -> bool:
        self._begin_call()
        if self._keys:
            self._calls.add("}")
        self._calls.end()
        return True

    def _begin_call(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._calls.begin(self._name)


def _escaped(text: str) -> str:
    """Returns the text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


Kinds = frozenset[str]
"""JSON types that a schema allows; none if it does not say."""
_NO_TEXT = {"integer", "number", "boolean", "object", "array", "null"}
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?")
_MOST_DEPTH = 8
_LARGEST_EXACT = 2.0**53


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """Returns the types that a schema names, directly, as alternatives, by its values or by
    reference to a definition in `root`. The schema comes from a client and may contain anything."""
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
    """Returns the JSON of an argument's value. `is_json`: whether the tag says that the value is
    not text."""
    value = _value(text, kinds, is_json)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (RecursionError, ValueError):  # the value nests too deeply, or is not a number of JSON
        return json.dumps(text, ensure_ascii=False)


def _value(text: str, kinds: Kinds, is_json: bool) -> Any:
    """Returns text if the schema allows text and nothing else fits, or else the JSON value."""
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
    """Returns the value that some templates write as a Python list or dict, or else the text."""
    try:
        value = literal(word)
    except NO_LITERAL:
        return text
    return value if isinstance(value, dict | list) else text
