"""Tool calls in the form of Python: `[weather(city="Oslo", days=3), clock()]`, as Llama 3.2 and 4
write them, or one on each line between tags (OLMo 3).

Each call is passed on when its bracket closes. A value is a Python literal or JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

import msgspec

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.said import plain
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.types import MALFORMED

_NAME = re.compile(r"\s*([A-Za-z_][\w.-]{0,127})\s*\(")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_WORDS = {"true": True, "false": False, "null": None}
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MOST_DEPTH = 64
_NO_CALL = -1
NO_LITERAL = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def read_pythonic(source: TextSource, calls: CallWriter, end: str) -> Steps[bool]:
    """Reads calls up to `end`, a bracket or a tag. Returns False, and reads nothing, if the first
    is none. What follows something that is no call is not read."""
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
    calls.add(json.dumps(arguments, ensure_ascii=False))
    calls.end()
    return True


def _read_call(source: TextSource, calls: CallWriter) -> Steps[tuple[str, dict[str, Any]] | None]:
    scan = _CallScan(calls)
    while True:
        text = source.stretch(lambda text, at: len(text))
        size = scan.push(text)
        if size == _NO_CALL:
            return None
        if size:
            source.unread(len(scan.text) - size)
            return _parsed(scan.text[:size])
        if not (yield from source.more()):
            return None


class _CallScan:
    """Finds the end of a call in a text that grows."""

    def __init__(self, calls: CallWriter) -> None:
        self.text = ""
        self._calls = calls
        self._at = 0
        self._quote = ""
        self._closing: list[str] = []

    def push(self, text: str) -> int:
        """Returns the size of the call, 0 while that is open, and _NO_CALL if it is none."""
        self.text += text
        if not self._at:
            found = _NAME.match(self.text)
            if found is None:
                may_begin = re.fullmatch(r"\s*[\w.-]{0,128}\s*", self.text) is not None
                return 0 if may_begin else _NO_CALL
            if not self._calls.knows(found[1]):
                return _NO_CALL
            self._closing.append(")")
            self._at = found.end()
        return self._scan()

    def _scan(self) -> int:
        while self._at < len(self.text):
            character = self.text[self._at]
            if self._quote:
                if character == "\\":
                    if self._at + 1 == len(self.text):
                        return 0
                    self._at += 1
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in _BRACKETS:
                self._closing.append(_BRACKETS[character])
                if len(self._closing) > _MOST_DEPTH:
                    return _NO_CALL
            elif character in ")]}" and self._closing.pop() != character:
                return _NO_CALL
            self._at += 1
            if not self._closing:
                return self._at
        return 0


def _parsed(source: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of a call; None if it is not one of Python's."""
    found = _NAME.match(source)
    assert found is not None
    arguments: dict[str, Any] = {}
    for part in _divided(source[found.end() : -1]):
        key = _KEY.match(part)
        if key is None:
            return None
        try:
            arguments[key[1]] = literal(plain(part[key.end() :].strip()))
            json.dumps(arguments[key[1]])
        except NO_LITERAL:
            return None
    return found[1], arguments


def _divided(inside: str) -> list[str]:
    """Divides the arguments at the commas that are not within brackets or quotes."""
    parts, begin, depth, at, quote = list[str](), 0, 0, 0, ""
    while at < len(inside):
        character = inside[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{)]}":
            depth += 1 if character in _BRACKETS else -1
        elif character == "," and not depth:
            parts.append(inside[begin:at])
            begin = at + 1
        at += 1
    parts.append(inside[begin:])
    return [part for part in parts if part.strip()]


def literal(text: str) -> Any:
    """Returns the value of a Python literal, or of JSON. Raises one of NO_LITERAL."""
    try:
        return msgspec.json.decode(text)
    except MALFORMED:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash that escapes nothing
        try:
            return _evaluated(ast.parse(text, mode="eval").body)
        except SyntaxError:  # a text with line breaks as they are
            return _evaluated(ast.parse(text.replace("\n", "\\n"), mode="eval").body)


def _evaluated(node: ast.expr) -> Any:
    """As `ast.literal_eval`, which knows no words of JSON."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _evaluated(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key must be text")
        return dict(zip(keys, map(_evaluated, node.values), strict=True))
    return ast.literal_eval(node)
