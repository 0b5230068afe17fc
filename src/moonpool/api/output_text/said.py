"""The content of one output: reasoning, text and tool calls, in the order in which they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.types import Token


class ToolCallDelta(NamedTuple):
    """One increment of a tool call: first its name, then more of its arguments."""

    number: int
    call_id: str | None
    name: str | None
    arguments: str


class Said(NamedTuple):
    """One piece of output: reasoning, then text, then calls. Content in another order becomes
    several pieces."""

    text: str = ""
    calls: Sequence[ToolCallDelta] = ()
    reasoning: str = ""
    tokens: Sequence[Token] = ()  # tokens from which the piece was made


class Sink:
    """Collects what a reader finds. `take` returns what is new since the last call."""

    def __init__(self) -> None:
        self._parts: list[Said] = []
        # white space at the beginning of a text, which is dropped beside a call
        self._space: list[str] = []
        self._has_text = False
        self._has_calls = False
        self.is_in_call = False  # whether a call has begun and is not complete

    @property
    def holds(self) -> bool:
        """Whether some text is held back that a call may follow."""
        return bool(self._space)

    def take(self) -> list[Said]:
        parts, self._parts = self._parts, []
        return parts

    def say(self, text: str) -> None:
        text = plain(text)
        if not self._has_text:
            if not text or text.isspace():
                self._space.append(text)
                return
            text, self._has_text = "".join((*self._space, text)), True
            self._space.clear()
        if text:
            self._add(Said(text))

    def reason(self, text: str) -> None:
        text = plain(text)
        if text:
            self._add(Said(reasoning=text))

    def call(self, delta: ToolCallDelta) -> None:
        self._space.clear()
        self._has_text, self._has_calls = False, True
        call_id = None if delta.call_id is None else plain(delta.call_id)
        self._add(Said(calls=(delta._replace(call_id=call_id),)))

    def end(self) -> None:
        """Ends the output."""
        space = "".join(self._space)
        if space and not self._has_calls:
            self._add(Said(space))

    def _add(self, new: Said) -> None:
        if not self._parts or _rank(self._parts[-1], True) > _rank(new, False):
            self._parts.append(new)
            return
        last = self._parts[-1]
        calls = _joined(last.calls, new.calls)
        self._parts[-1] = Said(last.text + new.text, calls, last.reasoning + new.reasoning)


def _rank(said: Said, last_of: bool) -> int:
    """Returns the rank of its last (or first) kind in the order of a `Said`."""
    kinds = [bool(said.reasoning), bool(said.text), bool(said.calls)]
    places = [place for place, is_there in enumerate(kinds) if is_there]
    return places[-1] if last_of else places[0]


def _joined(
    first: Sequence[ToolCallDelta], then: Sequence[ToolCallDelta]
) -> Sequence[ToolCallDelta]:
    """Joins the increments in their order. Arguments of one call that follow each other become one
    increment."""
    if not first or not then:
        return first or then
    (delta,), last = then, first[-1]
    if delta.name is not None or delta.number != last.number:
        return (*first, delta)
    return (*first[:-1], last._replace(arguments=last.arguments + delta.arguments))


def plain(text: str) -> str:
    """Returns the text without the signs of special tokens (see `marks`)."""
    if text.isascii():
        return text
    return "".join(c for c in text if not "\ud800" <= c <= "\udfff")
