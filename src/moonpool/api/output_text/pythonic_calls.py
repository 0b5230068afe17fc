"""Tool calls in the form of Python: `[weather(city="Oslo", days=3), clock()]`, as Llama 3.2 and 4
write them, or one on each line between tags (OLMo 3).

Each call is passed on when its bracket closes. A value is a Python literal or JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.types import MALFORMED

_NAME_CHARACTER = re.compile(r"[\w.-]")
_LONGEST_NAME_CHARS = 128
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_OUTSIDE, _IN_TEXT = re.compile(r"""["'()\[\]{},]"""), re.compile(r"""["'\\]""")
_WORDS = {"true": True, "false": False, "null": None}
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MOST_DEPTH = 64
NO_LITERAL = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def read_pythonic(source: TextSource, calls: CallWriter, end: str) -> Steps[bool]:
    """Reads calls up to `end`, a bracket or a tag. Returns False, and reads nothing, if the first
    item is not a call. Text after an item that is not a call is not read."""
    num_calls = 0
    while (yield from source.attempt(_pass_call(source, calls, comma=num_calls > 0))):
        num_calls += 1
    if num_calls:
        yield from source.attempt(_take_end(source, end))
    return num_calls > 0


def _take_end(source: TextSource, end: str) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(end)))


def _pass_call(source: TextSource, calls: CallWriter, comma: bool) -> Steps[bool]:
    yield from source.skip_space()
    if comma and (yield from source.take(",")):
        yield from source.skip_space()
    call = yield from _read_call(source, calls)
    if call is None:
        return False
    name, arguments = call
    calls.begin(name)
    calls.add(arguments)
    calls.end()
    return True


def _read_call(source: TextSource, calls: CallWriter) -> Steps[tuple[str, str] | None]:
    """Returns the name and the arguments, as JSON, of the next call."""
    name = yield from source.run(_NAME_CHARACTER, _LONGEST_NAME_CHARS)
    yield from source.skip_space()
    if not calls.knows(name) or not (yield from source.take("(")):
        return None
    scan, parts = _ArgumentScan(), list[str]()
    while not scan.is_complete:
        parts.append(source.stretch(scan.end_of))
        if scan.is_broken or not (scan.is_complete or (yield from source.more())):
            return None
    arguments = _json_of("".join(parts)[:-1], scan.commas, calls.spelled)
    return None if arguments is None else (name, arguments)


class _ArgumentScan:
    """Finds the end of a call's arguments in a text that grows. `commas`: the positions of the
    commas between arguments."""

    def __init__(self) -> None:
        self.commas: list[int] = []
        self.is_complete = False
        self.is_broken = False
        self._num_read = 0
        self._closing = [")"]
        self._quote = ""  # the quote that opened a text, of one or three characters
        self._escapes = False  # whether the last character was a backslash in a text
        self._num_quotes = 0  # number of equal quotes at the end, which may become three

    def end_of(self, text: str, at: int) -> int:
        """Returns the end of the part of the text from `at` on that belongs to the arguments,
        including their bracket."""
        before = self._num_read - at
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._escapes:
                self._escapes, at = False, at + 1
                continue
            found = (_IN_TEXT if self._quote else _OUTSIDE).search(text, at)
            if found is None or found.start() > at:
                self._num_quotes = 0
            if found is None:
                at = len(text)
                break
            at = found.end()
            self._meet(found[0], before + found.start())
        self._num_read = before + at
        return at

    def _meet(self, character: str, place: int) -> None:
        if character in "\"'":
            self._meet_quote(character)
            return
        self._num_quotes = 0
        if character == "\\":
            self._escapes = True
        elif character in _BRACKETS:
            self._closing.append(_BRACKETS[character])
            self.is_broken = len(self._closing) > _MOST_DEPTH
        elif character != ",":
            self.is_broken = self._closing.pop() != character
            self.is_complete = not self._closing
        elif len(self._closing) == 1:
            self.commas.append(place)

    def _meet_quote(self, quote: str) -> None:
        if self._quote and self._quote[0] != quote:
            self._num_quotes = 0
            return
        self._num_quotes += 1
        if len(self._quote) == 1:
            self._quote = ""
        elif not self._quote:  # the third quote in a row opens a triple-quoted text
            self._quote = quote * (3 if self._num_quotes == 3 else 1)
            self._num_quotes %= 3
        elif self._num_quotes == 3:
            self._quote, self._num_quotes = "", 0


def _json_of(inside: str, commas: Sequence[int], spelled: Callable[[str], str]) -> str | None:
    """Returns the text between the brackets of a call as JSON, or None if it is not Python."""
    arguments: dict[str, Any] = {}
    for begin, end in pairwise((-1, *commas, len(inside))):
        part = inside[begin + 1 : end]
        if not part.strip():
            continue
        key = _KEY.match(part)
        if key is None:
            return None
        try:
            arguments[key[1]] = literal(spelled(part[key.end() :]).strip())
        except NO_LITERAL:
            return None
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except NO_LITERAL:
        return None


def literal(text: str) -> Any:
    """Returns the value of a Python literal, or of JSON. Raises one of NO_LITERAL."""
    try:
        return msgspec.json.decode(text)
    except MALFORMED:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a backslash that escapes nothing
        try:
            return _evaluated(ast.parse(text, mode="eval").body)
        except SyntaxError:  # a text that contains line breaks
            return _evaluated(ast.parse(text.replace("\n", "\\n"), mode="eval").body)


def _evaluated(node: ast.expr) -> Any:
    """Evaluates like `ast.literal_eval`, which knows no words of JSON."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _evaluated(key) for key in node.keys]
        if not all(key is None or isinstance(key, str | int | float) for key in keys):
            raise ValueError("JSON has no such key")
        return dict(zip(keys, map(_evaluated, node.values), strict=True))
    return ast.literal_eval(node)
