"""Tool calls as JSON: `{"name": NAME, "arguments": {...}}`, alone or in a list.

Arguments are passed on as they are written. `parameters` is another name for them, and some models
write them as JSON in a string. JSON that names no function is not a call.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marks import Marks, is_special
from moonpool.api.output_text.pythonic_calls import read_pythonic
from moonpool.api.output_text.source import Say, Steps, TextSource
from moonpool.types import MALFORMED

NO_MARKS = Marks(())
_ARGUMENTS = ("arguments", "parameters")
_SCALAR_END = re.compile(r"[\s,}\]]")


def read_calls(source: TextSource, calls: CallWriter, ends: Marks = NO_MARKS) -> Steps[bool]:
    """Reads one call or a list of them. Returns False, and reads nothing, if there is no call.

    Reading of a list stops at the first item that is not a call. `ends`: marks that end a call
    which is not complete.
    """
    yield from source.skip_space()
    if (yield from source.peek()) == "[":
        return (yield from source.attempt(_read_list(source, calls, ends)))
    return (yield from read_call(source, calls, ends))


def _read_list(source: TextSource, calls: CallWriter, ends: Marks) -> Steps[bool]:
    yield from source.take("[")
    num_calls = 0
    while (yield from source.attempt(_read_item(source, calls, ends, "," if num_calls else ""))):
        num_calls += 1
    if num_calls:
        yield from source.attempt(_take_behind_space(source, "]"))
    return num_calls > 0


def _read_item(source: TextSource, calls: CallWriter, ends: Marks, comma: str) -> Steps[bool]:
    if comma and not (yield from _take_behind_space(source, comma)):
        return False
    yield from source.skip_space()
    return (yield from read_call(source, calls, ends))


def _take_behind_space(source: TextSource, text: str) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(text)))


def read_call(source: TextSource, calls: CallWriter, ends: Marks) -> Steps[bool]:
    """Reads one call. Returns False, and reads nothing, if there is no call."""
    return (yield from source.attempt(_Call(source, calls, ends).read()))


class _Call:
    """One call that is being read, starting at its brace."""

    def __init__(self, source: TextSource, calls: CallWriter, ends: Marks) -> None:
        self._source = source
        self._calls = calls
        self._ends = ends
        self._name: str | None = None
        # arguments that came before the name, or that come as a string
        self._arguments: str | None = None
        self._has_begun = False
        self._is_complete = False
        self._is_nested = False

    def read(self) -> Steps[bool]:
        """Reads the call, and returns whether it is one."""
        source = self._source
        if not (yield from source.take("{")):
            return False
        num_fields = 0
        while True:
            yield from source.skip_space()
            if (yield from source.take("}")):
                return self._end()
            if num_fields and not (yield from source.take(",")):
                return self._has_begun
            yield from source.skip_space()
            if not (yield from self._field()):
                return self._has_begun
            num_fields += 1

    def _field(self) -> Steps[bool]:
        """Reads a key and its value. Returns False if that is impossible."""
        source = self._source
        key = yield from self._string()
        yield from source.skip_space()
        if key is None or not (yield from source.take(":")):
            return False
        yield from source.skip_space()
        if key == "function" and not self._is_nested and (yield from source.peek()) == "{":
            self._is_nested = True  # arguments are nested as in OpenAI's API
            return (yield from self.read())
        if key == "name" and not self._has_begun:
            self._name = yield from self._string()
            return self._calls.knows(self._name)
        if key in _ARGUMENTS and self._name is not None and not self._has_begun:
            return (yield from self._pass_arguments(self._name))
        value = yield from self._value()
        if key in _ARGUMENTS and value is not None:
            self._arguments = _object_text(value)
        return value is not None

    def _string(self) -> Steps[str | None]:
        """Reads a JSON string. Returns None if no string follows."""
        if (yield from self._source.peek()) != '"':
            return None
        text = yield from self._value()
        try:
            found: Any = msgspec.json.decode(text or "")
        except MALFORMED:
            return None
        return found if isinstance(found, str) else None

    def _value(self) -> Steps[str | None]:
        """Reads a JSON value. Returns the text of the value, or None if it is not complete."""
        parts: list[str] = []
        complete = yield from pass_value(self._source, parts.append, self._ends)
        return self._calls.spelled("".join(parts)) if complete else None

    def _pass_arguments(self, name: str) -> Steps[bool]:
        source = self._source
        if (yield from source.peek()) != "{":
            value = yield from self._value()
            self._arguments = None if value is None else _object_text(value)
            return value is not None
        self._begin(name)
        return (yield from pass_value(source, self._calls.add, self._ends))

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._calls.begin(name)

    def _end(self) -> bool:
        if self._is_complete:
            return True
        if not self._has_begun:
            if self._name is None:
                return False
            self._begin(self._name)
            if self._arguments is not None:
                self._calls.add(self._arguments)
        self._calls.end()
        self._is_complete = True
        return True


def _object_text(value: str) -> str:
    """Returns the text of the arguments: the content of a string, and an empty object for null."""
    try:
        decoded = msgspec.json.decode(value)
    except MALFORMED:
        return value
    if decoded is None:
        return "{}"
    return decoded if isinstance(decoded, str) else value


def pass_value(source: TextSource, say: Say, ends: Marks = NO_MARKS) -> Steps[bool]:
    """Passes on the text of a JSON value, up to one of the marks at most.

    Returns whether the value is complete. Only brackets and quotes tell an object, a list or a
    string; the content is not checked.
    """
    first = yield from source.peek()
    scan = _Scan(ends, is_scalar=first not in '{["')
    while True:
        piece = source.stretch(scan.end_of)
        if piece:
            say(piece)
        if scan.is_ended and scan.is_in_string:
            if (yield from source.comes(_ends_call(source, ends))):
                return False
            if source.end == "cut":  # nobody knows
                source.rest()
                return False
            scan.is_ended = False
            say((yield from source.take(*ends.texts)))
            continue
        if scan.is_complete or scan.is_ended:
            return scan.is_complete
        if not (yield from source.more()):
            source.rest()  # only the beginning of a mark follows
            return scan.is_scalar and scan.has_text


def _ends_call(source: TextSource, ends: Marks) -> Steps[bool]:
    """Whether a mark within a string ends the call; the text after it tells. The mark may also be
    part of the string."""
    yield from source.take(*ends.texts)
    yield from source.skip_space()
    next_one = yield from source.peek()
    return is_special(next_one) or (not next_one and source.end == "stop")


class _Scan:
    """Finds where a JSON value ends in a text that grows."""

    def __init__(self, ends: Marks, is_scalar: bool) -> None:
        self.is_scalar = is_scalar
        self.is_complete = False
        self.is_ended = False  # whether a mark ended the value
        self.has_text = False
        self._ends = ends
        self._outside, self._inside = _patterns(ends.texts)
        self._depth = 0
        self.is_in_string = False  # whether the scan stopped within a string
        self._escapes = False  # whether the last character was a backslash in a string

    def end_of(self, text: str, at: int) -> int:
        """Returns the end of the part of the text from `at` on that belongs to the value."""
        end = self._scalar(text, at) if self.is_scalar else self._nested(text, at)
        self.has_text = self.has_text or end > at
        return end

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        if found is None:
            return len(text)
        self.is_complete = self.has_text or found.start() > at
        self.is_ended = not self.is_complete
        return found.start()

    def _nested(self, text: str, at: int) -> int:
        while at < len(text):
            if self._escapes:
                self._escapes, at = False, at + 1
                continue
            pattern = self._inside if self.is_in_string else self._outside
            found = pattern.search(text, at)
            if found is None:
                return len(text) - (0 if self.is_in_string else self._ends.overlap(text, at))
            if found[0] in self._ends.texts:
                self.is_ended = True
                return found.start()
            at = found.end()
            self._meet(found[0])
            if self._depth == 0 and not self.is_in_string:
                self.is_complete = True
                return at
        return at

    def _meet(self, character: str) -> None:
        if character == "\\":
            self._escapes = True
        elif character == '"':
            self.is_in_string = not self.is_in_string
        else:
            self._depth += 1 if character in "{[" else -1


@cache
def _patterns(ends: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns the patterns to search for outside and within strings. A mark within a string is
    text, unless it is a special token."""
    outside = [*map(re.escape, ends), r'["{}\[\]]']
    inside = [*(re.escape(end) for end in ends if is_special(end)), r'["\\]']
    return re.compile("|".join(outside)), re.compile("|".join(inside))


_BEGINS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"


def read_bare(source: TextSource, calls: CallWriter) -> Steps[bool]:
    """Reads the calls at the beginning of an answer. Returns False if the answer does not begin
    with a call."""
    yield from source.skip_space()
    yield from source.take(*_BEGINS)  # this mark is mostly a special token, which has no text
    if (yield from source.peek()) == "[" and (yield from source.comes(_is_pythonic(source))):
        yield from source.take("[")
        is_call = yield from read_pythonic(source, calls, "]")
        if is_call:
            yield from source.take(_END)
        return is_call
    num_calls = 0
    while (yield from source.attempt(_read_next(source, calls, is_first=not num_calls))):
        num_calls += 1
    return num_calls > 0


def _is_pythonic(source: TextSource) -> Steps[bool]:
    yield from source.take("[")
    yield from source.skip_space()
    first = yield from source.peek()
    return first.isalpha() or first == "_"


def _read_next(source: TextSource, calls: CallWriter, is_first: bool) -> Steps[bool]:
    yield from source.skip_space()
    if not is_first:
        yield from source.take(";")
        yield from source.skip_space()
    if (yield from source.peek()) not in ("{", "["):
        return False
    return (yield from read_calls(source, calls))
