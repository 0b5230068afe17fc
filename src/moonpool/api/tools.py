"""Tool calls: which calls a request allows, and their parsing from the model's output.

A model writes optional tool calls as text, in the format of its chat template: between
`<tool_call>` and `</tool_call>` JSON (Hermes, Qwen) or tagged arguments (`output_text`), or an
output that is only JSON (Llama, Mistral). A required tool call is constrained to JSON by structured
output, for every model. Text that looks like a call but is none stays text, so no output is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from moonpool.api.bodies import ChatBody
from moonpool.api.errors import ApiError
from moonpool.api.output_text.reasoning import overlap
from moonpool.api.output_text.tagged_calls import CallEnd, read_tagged_call
from moonpool.types import MALFORMED

MOST_TOOLS = 128
_MOST_CALLS = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCallDelta(NamedTuple):
    """One increment of a tool call: first its name, then more of its arguments."""

    number: int
    call_id: str | None
    name: str | None
    arguments: str


NextId = Callable[[], str]
Read = tuple[str, list[ToolCallDelta]]
"""Text outside of calls, and increments of calls."""


class ToolReader(Protocol):
    """Parses the text of one output as it arrives."""

    def push(self, text: str) -> Read: ...

    def flush(self, cut: bool) -> Read:
        """Returns what is left after the output has ended. `cut`: `max_tokens` ended it."""
        ...


class Tools:
    """The tool settings of one request. Raises `ApiError` if they contradict each other."""

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
            raise _bad_choice("'tool_choice' must be none, auto, required, or name a function.")
        self._may_call = bool(self._functions) and choice != "none"
        if self.must_call and not self._functions:
            raise _bad_choice("'tool_choice' requires a tool call, but 'tools' is empty.")
        if self._named and self._named not in self._functions:
            raise _bad_choice(f"'tool_choice' names {self._named!r}, which is not among 'tools'.")

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the required calls."""
        assert self.must_call
        if self._named:
            return _closed(self._functions[self._named])
        definitions: dict[str, Any] = {}
        calls = []
        for name, parameters in self._functions.items():
            own = _closed(parameters)
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

    def reader(self, template: str) -> Callable[[NextId], ToolReader] | None:
        """Returns a factory of parsers, one per output; None if no calls are possible.

        A parser takes the ids of its calls from what is passed to the factory. `template` is the
        chat template that describes the tools to the model.
        """
        if self._named:
            return lambda next_id: _NamedCall(self._named, next_id)
        if self.must_call or (self._may_call and _OPEN not in template):
            return lambda next_id: _JsonCalls(_Calls(self._functions, self._one, next_id))
        if not self._may_call:
            return None
        return lambda next_id: _TaggedCalls(_Calls(self._functions, self._one, next_id))


_SAY_MORE = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "minProperties"),
}


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Copies the schema of a function's parameters, without parameters that it does not name.

    A schema that says nothing of others allows them. A small model then adds some without end.
    """
    named, required = parameters.get("properties"), parameters.get("required", [])
    if not isinstance(named, dict) or not named or _SAY_MORE & parameters.keys():
        return dict(parameters)
    if not isinstance(required, list) or not all(
        isinstance(r, str) and r in named for r in required
    ):
        return dict(parameters)
    return parameters | {"additionalProperties": False}


class _NamedCall:
    """Parses an output that consists of one call's arguments."""

    def __init__(self, name: str, next_id: NextId) -> None:
        self._name: str | None = name
        self._next_id = next_id

    def push(self, text: str) -> Read:
        if not text:
            return "", []
        name, self._name = self._name, None
        call_id = None if name is None else f"call_{self._next_id()}"
        return "", [ToolCallDelta(0, call_id, name, text)]

    def flush(self, cut: bool) -> Read:
        return "", []


class _Calls:
    """Decodes and counts the calls of one output."""

    def __init__(self, functions: Mapping[str, dict[str, Any]], one: bool, next_id: NextId) -> None:
        self._functions = functions
        self._one = one
        self._next_id = next_id
        self._count = 0

    def read(self, source: str, end: CallEnd = "closed") -> list[ToolCallDelta] | None:
        """Decodes one call or a list of calls. Returns None if the text is something else."""
        try:
            found = msgspec.json.decode(source)
        except MALFORMED:
            return self._read_tagged(source, end)
        calls = found if isinstance(found, list) else [found]
        deltas: list[ToolCallDelta] = []
        for call in calls:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._functions:
                return None
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, str):  # some models write them as JSON in a string
                arguments = msgspec.json.encode(arguments).decode()
            call_id = f"call_{self._next_id()}"
            deltas.append(ToolCallDelta(self._count + len(deltas), call_id, name, arguments))
        return self._counted(deltas) if deltas else None

    def _read_tagged(self, source: str, end: CallEnd) -> list[ToolCallDelta] | None:
        found = read_tagged_call(source, self._functions, end)
        if found is None:
            return None
        name, arguments = found
        text = msgspec.json.encode(arguments).decode()
        call_id = f"call_{self._next_id()}"
        return self._counted([ToolCallDelta(self._count, call_id, name, text)])

    def _counted(self, deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
        if self._one:  # parallel_tool_calls is false
            deltas = deltas[: 1 - self._count]
        self._count += len(deltas)
        return deltas


class _JsonCalls:
    """Parses an output that is entirely calls, or entirely text."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
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

    def flush(self, cut: bool) -> Read:
        held, self._text = self._text, ""
        deltas = self._calls.read(held) if held else []
        if deltas is None and cut:
            deltas = self._calls.read(_whole_items(held))
        return ("", deltas) if deltas is not None else (held, [])


class _TaggedCalls:
    """Parses calls between tags, with text around them."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._held = ""  # from a tag on, or a possible beginning of a tag
        self._behind = False  # after a call: the line breaks that follow it are not text

    def push(self, text: str) -> Read:
        self._held += text
        plain, deltas = "", list[ToolCallDelta]()
        while True:
            if self._behind:
                self._held = self._held.lstrip("\n")
                self._behind = not self._held
            before, tag, rest = self._held.partition(_OPEN)
            if not tag:
                keep = overlap(self._held, _OPEN)
                cut = len(self._held) - keep
                plain, self._held = plain + self._held[:cut], self._held[cut:]
                return plain, deltas
            inside, end, after = rest.partition(_CLOSE)
            if not end:
                plain, self._held = plain + before, tag + rest
                return plain, deltas
            found = self._calls.read(inside)
            self._held, self._behind = after, found is not None
            plain += before if found is not None else before + tag + inside + end
            deltas += found or []

    def flush(self, cut: bool) -> Read:
        held, self._held = self._held, ""
        if held.startswith(_OPEN):  # a model may end its output instead of closing the tag
            deltas = self._calls.read(held[len(_OPEN) :], "cut" if cut else "open")
            if deltas is not None:
                return "", deltas
        return held, []


def _whole_items(text: str) -> str:
    """Returns the complete items at the front of a JSON list that was cut, as a list."""
    decoder, items = json.JSONDecoder(), list[str]()
    at = text.find("[") + 1
    while at:
        begin = at + len(text[at:]) - len(text[at:].lstrip(" \n\r\t,"))
        try:
            _, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            break
        items.append(text[begin:at])
    return f"[{','.join(items)}]"


def together(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Returns the calls of a finished output in OpenAI's format."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls[delta.number] = {"id": delta.call_id, "type": "function", "function": function}
        else:
            calls[delta.number]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def _functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the schema of each function's parameters by name."""
    if len(tools) > MOST_TOOLS:
        raise ApiError(f"'tools' may hold at most {MOST_TOOLS} tools.", param="tools")
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(
                f"'{where}' must have the type 'function' and a field 'function'.", param=where
            )
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
        raise _bad_choice(
            "'tool_choice' as an object must have the type 'function' and a function name."
        )
    return name


def _bad_choice(text: str) -> ApiError:
    return ApiError(text, param="tool_choice")
