"""Calls of tools: which a request allows, and finding them in what the model says.

A model that may call tools does so in its text, in the way its chat template taught it: JSON
between `<tool_call>` and `</tool_call>` (Hermes, Qwen), or an answer that is nothing but JSON
(Llama, Mistral). One that must call is held to JSON by a form (see `api.forms`), whatever it was
taught. What looks like a call and is none stays text: nothing a model said is lost.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from moonpool.api.bodies import ChatBody
from moonpool.api.errors import ApiError

MOST_TOOLS = 128
_MOST_CALLS = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Piece(NamedTuple):
    """Of a call, what has become certain: at first its name, then more of its arguments."""

    number: int
    call_id: str | None
    name: str | None
    arguments: str


Read = tuple[str, list[Piece]]
"""Text that is no call, and pieces of calls."""


class ToolReader(Protocol):
    """One answer's text, as it comes."""

    def push(self, text: str) -> Read: ...

    def flush(self) -> Read:
        """The answer has ended."""
        ...


class Tools:
    """What one request says of tools. Raises `ApiError` for what cannot be meant."""

    def __init__(self, body: ChatBody) -> None:
        self._functions = _functions_of(body.tools or ())
        self._one = body.parallel_tool_calls is False
        choice = body.tool_choice
        self._named = ""
        self.must_call = choice == "required"
        if isinstance(choice, dict):
            self._named = _named(choice)
            self.must_call = True
        elif choice not in (None, "none", "auto", "required"):
            raise _bad_choice("'tool_choice' is none, auto, required, or names a function.")
        self._may_call = bool(self._functions) and choice != "none"
        if self.must_call and not self._functions:
            raise _bad_choice("'tool_choice' needs 'tools' to choose from.")
        if self._named and self._named not in self._functions:
            raise _bad_choice(f"'tool_choice' names {self._named!r}, which is not among 'tools'.")

    def schema(self) -> dict[str, Any]:
        """What the answer must be, where it must call."""
        assert self.must_call
        if self._named:
            return self._functions[self._named]
        definitions: dict[str, Any] = {}
        calls = []
        for name, parameters in self._functions.items():
            own = dict(parameters)
            definitions |= own.pop("$defs", {})
            fields = {"name": {"const": name}, "parameters": own}
            calls.append(
                {
                    "type": "object",
                    "properties": fields,
                    "required": list(fields),
                    "additionalProperties": False,
                }
            )
        most = 1 if self._one else _MOST_CALLS
        whole = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
        return whole | ({"$defs": definitions} if definitions else {})

    def reader(self, template: str) -> Callable[[], ToolReader] | None:
        """Makes one for each answer; None where there can be no calls. `template`: by which the
        model was told of the tools."""
        if self._named:
            return lambda: _NamedCall(self._named)
        if self.must_call or (self._may_call and _OPEN not in template):
            return lambda: _JsonCalls(self._functions, self._one)
        return (lambda: _TaggedCalls(self._functions, self._one)) if self._may_call else None


class _NamedCall:
    """The whole answer is one call's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Read:
        if not text:
            return "", []
        name, self._name = self._name, None
        return "", [Piece(0, None if name is None else _new_id(), name, text)]

    def flush(self) -> Read:
        return "", []


class _Calls:
    """Counts the calls of one answer."""

    def __init__(self, names: Collection[str], one: bool) -> None:
        self._names = names
        self._one = one
        self._count = 0

    def read(self, source: str) -> list[Piece] | None:
        """JSON of one call or a list of them; None if it is something else."""
        try:
            found = msgspec.json.decode(source)
        except (msgspec.DecodeError, RecursionError):
            return None
        calls = found if isinstance(found, list) else [found]
        pieces: list[Piece] = []
        for call in calls:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return None
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, str):  # some write them as JSON in JSON
                arguments = msgspec.json.encode(arguments).decode()
            pieces.append(Piece(self._count + len(pieces), _new_id(), name, arguments))
        if not pieces:
            return None
        if self._one:  # the others are not wanted
            pieces = pieces[: 1 - self._count]
        self._count += len(pieces)
        return pieces


class _JsonCalls:
    """The whole answer is calls, or none of it is."""

    def __init__(self, names: Collection[str], one: bool) -> None:
        self._calls = _Calls(names, one)
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> Read:
        if self._is_text:
            return text, []
        self._text += text
        begins = self._text.lstrip()
        if begins and begins[0] not in "{[":
            self._is_text = True
            held, self._text = self._text, ""
            return held, []
        return "", []

    def flush(self) -> Read:
        held, self._text = self._text, ""
        pieces = self._calls.read(held) if held else []
        return ("", pieces) if pieces is not None else (held, [])


class _TaggedCalls:
    """Calls between tags, text around them."""

    def __init__(self, names: Collection[str], one: bool) -> None:
        self._calls = _Calls(names, one)
        self._held = ""  # from a tag on, or what may become one
        self._behind = False  # a call: line breaks that follow are not text

    def push(self, text: str) -> Read:
        self._held += text
        said, pieces = "", list[Piece]()
        while True:
            if self._behind:
                self._held = self._held.lstrip("\n")
                self._behind = not self._held
            before, tag, rest = self._held.partition(_OPEN)
            if not tag:
                keep = _overlap(self._held, _OPEN)
                cut = len(self._held) - keep
                said, self._held = said + self._held[:cut], self._held[cut:]
                return said, pieces
            inside, end, after = rest.partition(_CLOSE)
            if not end:
                said, self._held = said + before, tag + rest
                return said, pieces
            found = self._calls.read(inside)
            self._held, self._behind = after, found is not None
            said += before if found is not None else before + tag + inside + end
            pieces += found or []

    def flush(self) -> Read:
        held, self._held = self._held, ""
        if held.startswith(_OPEN):  # a model may end its answer in the place of the tag
            pieces = self._calls.read(held[len(_OPEN) :])
            if pieces is not None:
                return "", pieces
        return held, []


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of the tag."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if tag.startswith(text[-n:])), 0)


def together(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The calls of an answer that has ended, as OpenAI writes them."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.name is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls[piece.number] = {"id": piece.call_id, "type": "function", "function": function}
        else:
            calls[piece.number]["function"]["arguments"] += piece.arguments
    return list(calls.values())


def _functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name -> schema of its parameters."""
    if len(tools) > MOST_TOOLS:
        raise ApiError(f"'tools' may hold at most {MOST_TOOLS} tools.", param="tools")
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(f"'{where}' must be of type 'function' and hold one.", param=where)
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            text = f"'{where}.function.name' must be 1 to 64 letters, digits, '_', '-' or '.'."
            raise ApiError(text, param=f"{where}.function.name")
        if parameters is not None and not isinstance(parameters, dict):
            text = f"'{where}.function.parameters' must be a JSON schema."
            raise ApiError(text, param=f"{where}.function.parameters")
        functions[name] = parameters or {"type": "object"}
    return functions


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str) or not name:
        raise _bad_choice("'tool_choice' as an object must be of type 'function' and name one.")
    return name


def _bad_choice(text: str) -> ApiError:
    return ApiError(text, param="tool_choice")


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
