"""Converts a grammar in GBNF to Lark, which llguidance reads.

GBNF is the notation of llama.cpp and of vLLM's examples (xgrammar's EBNF): rules `name ::= ...`, of
which `root` describes the whole output. A rule that does not lead back to itself becomes one
terminal, which matches like a regular expression. The other rules become rules over these
terminals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

MAX_NESTING = 64
_RULE_START = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE | re.ASCII)
_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | \#[^\n]* )
    | (?P<rule> [\w-]+ ) [ \t]* ::=
    | (?P<name> [\w-]+ )
    | (?P<text> "(?: [^"\\\n] | \\. )*" )
    | (?P<characters> \[ (?: [^\]\\\n] | \\. )* \] )
    | (?P<times> [*+?] | \{ \s* \d{0,6} \s* (?: , \s* \d{0,6} \s* )? \} )
    | (?P<mark> [().|] )
    """,
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([^xuU])|([^\\])", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_SURROGATES = range(0xD800, 0xE000)


class GbnfError(ValueError):
    """The text is not a grammar in GBNF; one line says where and why."""


def is_gbnf(text: str) -> bool:
    """Whether a line begins a rule with `::=` as in GBNF, which never occurs in Lark."""
    return _RULE_START.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Returns the grammar in Lark's notation. Raises `GbnfError`."""
    rules = dict(_Parser(text).rules())
    if "root" not in rules:
        raise GbnfError("it has no rule named 'root'")
    uses = {name: {p for p in parts if isinstance(p, _Use)} for name, parts in rules.items()}
    for name, used in uses.items():
        if not used <= rules.keys():
            raise GbnfError(
                f"the rule '{name}' uses '{min(used - rules.keys())}', which is not defined"
            )
    plain = _not_recursive(uses)
    written = {
        name: f"{'T' if name in plain else 'r'}{number}" for number, name in enumerate(rules)
    }
    lines = [f"start: {written['root']}"]
    for name, parts in rules.items():
        told = (written[part] if isinstance(part, _Use) else part for part in parts)
        lines.append(f"{written[name]}: {' '.join(told)}")
    return "\n".join(lines)


def _not_recursive(uses: Mapping[str, Collection[str]]) -> set[str]:
    """Returns the rules that lead neither back to themselves nor to a rule that does."""
    users: dict[str, list[str]] = {name: [] for name in uses}
    for user, used in uses.items():
        for name in used:
            users[name].append(user)
    num_left = {name: len(used) for name, used in uses.items()}
    ready = [name for name, count in num_left.items() if not count]
    plain: set[str] = set()
    while ready:
        name = ready.pop()
        plain.add(name)
        for user in users[name]:
            num_left[user] -= 1
            if not num_left[user]:
                ready.append(user)
    return plain


class _Use(str):
    """A reference to a rule within another rule."""

    __slots__ = ()


class _Token(NamedTuple):
    kind: str  # name of a group of _TOKEN, or "end"
    text: str
    position: int


class _Parser:
    """Reads rules one by one. Line breaks only separate words, as in xgrammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._read()
        self._token = next(self._tokens)

    def rules(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the name of each rule with its parts in Lark. Raises `GbnfError`."""
        names: set[str] = set()
        while self._token.kind != "end":
            if self._token.kind != "rule":
                raise self._error("a rule such as root ::= ... is expected")
            name = self._token.text
            if name in names:
                raise self._error(f"the rule '{name}' is defined twice")
            names.add(name)
            self._next()
            yield name, self._alternatives(0)

    def _alternatives(self, depth: int) -> list[str]:
        if depth > MAX_NESTING:
            raise self._error(f"at most {MAX_NESTING} parentheses may be nested")
        parts = self._sequence(depth)
        while self._token.text == "|" and self._token.kind == "mark":
            self._next()
            parts += ["|", *self._sequence(depth)]
        return parts

    def _sequence(self, depth: int) -> list[str]:
        parts: list[str] = []
        while (item := self._item(depth)) is not None:
            parts += item
            if self._token.kind == "times":
                parts.append(self._times())
        return parts or ['""']

    def _item(self, depth: int) -> list[str] | None:
        """Returns one part of a sequence, or None if the sequence has ended."""
        kind, text, _ = self._token
        if kind in ("rule", "end") or (kind == "mark" and text in "|)"):
            return None
        if kind == "times":
            raise self._error(f"there is nothing before {text!r} to repeat")
        if kind == "mark" and text == "(":
            self._next()
            inside = self._alternatives(depth + 1)
            if self._token.text != ")" or self._token.kind != "mark":
                raise self._error("a ')' is missing")
            self._next()
            return ["(", *inside, ")"]
        if kind == "name":
            found: str = _Use(text)
        elif kind == "text":
            characters = "".join(map(chr, self._characters(text[1:-1])))
            found = json.dumps(characters, ensure_ascii=False)
        else:
            found = "/(?s:.)/" if text == "." else self._set(text[1:-1])
        self._next()
        return [found]

    def _times(self) -> str:
        """Returns a repetition in Lark's notation."""
        text = self._token.text
        if text not in "*+?":
            least, comma, most = text.strip("{}").replace(" ", "").partition(",")
            low, high = int(least or 0), int(most) if most else -1
            if not (least or most) or (comma and 0 <= high < low):
                raise self._error(f"{text} is no range of repetitions")
            text = f"{{{low},{'' if high < 0 else high}}}" if comma else f"{{{low}}}"
        self._next()
        if self._token.kind == "times":
            raise self._error("two repetitions follow each other; use parentheses")
        return text

    def _set(self, text: str) -> str:
        """Returns a set of characters as a regular expression in Lark."""
        negated = text.startswith("^")
        codes = list(self._characters(text[negated:], marks_ranges=True))
        if not codes:
            if negated:
                return "/(?s:.)/"
            raise self._error("'[]' matches no character")
        parts, at = [], 0
        while at < len(codes):
            is_range = codes[at + 1 : at + 2] == [_RANGE] and at + 2 < len(codes)
            first, last = codes[at], codes[at + 2] if is_range else codes[at]
            at += 3 if is_range else 1
            first, last = (ord("-") if code == _RANGE else code for code in (first, last))
            if last < first:
                raise self._error(f"[{text[:40]}] has a range that ends before it begins")
            parts.append(rf"\u{{{first:x}}}" + (rf"-\u{{{last:x}}}" if is_range else ""))
        return f"/[{'^' * negated}{''.join(parts)}]/"

    def _characters(self, text: str, marks_ranges: bool = False) -> Iterator[int]:
        """Yields the code points of a text with escapes. `marks_ranges`: whether a plain '-' is
        returned as _RANGE."""
        position = 0
        while position < len(text):
            match = _CHARACTER.match(text, position)
            if match is None:
                raise self._error(f"{text[position : position + 2]!r} is no escape")
            *numbers, letter, plain = match.groups()
            number = next((int(n, 16) for n in numbers if n is not None), None)
            if number is None:
                number = ord(_LETTERS.get(letter, letter) if plain is None else plain)
            if number > 0x10FFFF or number in _SURROGATES:
                raise self._error(f"{match[0]} is no character")
            yield _RANGE if marks_ranges and plain == "-" else number
            position = match.end()

    def _next(self) -> None:
        self._token = next(self._tokens)

    def _read(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                self._token = _Token("", "", position)
                shown = self._text[position : position + 20].split("\n")[0]
                raise self._error(f"{shown!r} is not understood")
            kind = match.lastgroup or ""
            if kind != "space":
                yield _Token(kind, match[kind], position)
            position = match.end()
        while True:
            yield _Token("end", "", position)

    def _error(self, why: str) -> GbnfError:
        line = self._text.count("\n", 0, self._token.position) + 1
        return GbnfError(f"line {line}: {why}")


_RANGE = -1
