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

Seed-OSS, MiniMax M2 and DeepSeek from V3.2 on have other names for the tags of the first form.
Values may hold any of these tags: what follows a tag tells whether it is one. The arguments are
passed on as the JSON that they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.api.output_text.tagged_values import Kinds, kinds_of, value_as_json

LONGEST_NAME_CHARS = 256
_HEADER_END = Marks((">",))
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


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
            return True  # the output has ended
        if tag in ends.texts:
            source.unread(len(tag))
            return writer.end()


def read_pairs(source: TextSource, calls: CallWriter, ends: Marks) -> Steps[bool]:
    """Reads one call of the second form, up to a mark of `ends`. Returns False if there is none."""
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
            return True  # the output has ended
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
    """Reads a value. Returns the tag behind it, or "" if the output ends first.

    ends: tags that may end it, and the steps that tell whether one does. Else it is a part of it.
    """
    marks = Marks(ends)
    while True:
        tag = yield from source.until(marks, writer.add, in_call=True)
        if tag and not (yield from source.comes(ends[tag]())) and source.end != "cut":
            writer.add(tag)
            continue
        if tag and source.end == "cut":  # nobody knows whether it ends the value
            source.rest()
            tag = ""
        writer.end_value(is_whole=source.end != "cut")
        if not tag and source.end == "stop":
            writer.end()
        return tag


def _comes(source: TextSource, texts: Sequence[str]) -> Steps[bool]:
    """Whether one of these comes next, or the output ends by itself, after white space."""
    yield from source.skip_space()
    if texts and (yield from source.take(*texts)):
        return True
    return (yield from source.peek()) == "" and source.end == "stop"


def _parameter_comes(source: TextSource, writer: _ArgumentWriter) -> Steps[bool]:
    """Whether the rest of a tag names a parameter that has no value yet."""
    header = yield from source.before(_HEADER_END, LONGEST_NAME_CHARS)
    return header is not None and writer.lacks(header[0].partition('"')[0].strip())


class _ArgumentWriter:
    """Writes the arguments of one call as JSON. The call begins with its first argument."""

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
        self._streams = False  # the value is text in any case
        self._parts: list[str] = []
        self._is_first = True
        self._newline = ""  # at the end of what has come: it belongs to the tag if a tag follows

    def lacks(self, key: str) -> bool:
        """Whether the function has this parameter, and the call has no value for it."""
        return key not in self._keys and (not self._properties or key in self._properties)

    def begin(self, key: str, attributes: str) -> None:
        """Begins a value. `attributes`: what else stands in its tag."""
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
        """`is_whole`: else a limit has cut it, and only text is taken in part."""
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
    """The text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
