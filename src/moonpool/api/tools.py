"""Tool calls: which calls a request allows.

A model writes optional tool calls as text, in the format of its family (see `output_text`). A
required tool call is constrained to JSON by structured output, for every model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.api.bodies import ChatBody
from moonpool.api.errors import ApiError
from moonpool.api.output_text.model_output import CallRules
from moonpool.api.output_text.said import ToolCallDelta

MOST_TOOLS = 128
_MOST_CALLS = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tools:
    """The tool settings of one request."""

    def __init__(self, body: ChatBody, num_calls_before: int | None = None) -> None:
        """`num_calls_before`: number of calls in the messages, if the body no longer has these.

        Raises `ApiError` if the settings contradict each other.
        """
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
        if num_calls_before is None:
            num_calls_before = sum(map(_num_calls, body.messages or ()))
        self.num_calls_before = num_calls_before
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

    def rules(self) -> CallRules | None:
        """Returns which calls an output may have, or None if it may have none."""
        if not self._may_call and not self.must_call:
            return None
        own = (self._functions, self._one, self.must_call, self._named)
        return CallRules(*own, self.num_calls_before)


_SAY_MORE = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "minProperties"),
}


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema of a function's parameters that allows no further parameters.

    A schema that says nothing about further parameters allows them. A small model then adds
    parameters without end.
    """
    named, required = parameters.get("properties"), parameters.get("required", [])
    if not isinstance(named, dict) or not named or _SAY_MORE & parameters.keys():
        return dict(parameters)
    if not isinstance(required, list) or not all(
        isinstance(r, str) and r in named for r in required
    ):
        return dict(parameters)
    return parameters | {"additionalProperties": False}


def together(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Returns the calls of a finished output in OpenAI's format."""
    calls: dict[int, tuple[str | None, str | None, list[str]]] = {}
    for delta in deltas:
        if delta.name is not None:
            calls[delta.number] = (delta.call_id, delta.name, [])
        calls[delta.number][2].append(delta.arguments)
    return [
        {"id": own, "type": "function", "function": {"name": name, "arguments": "".join(parts)}}
        for own, name, parts in calls.values()
    ]


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


def _num_calls(message: Mapping[str, Any]) -> int:
    """Returns the number of calls in a message, which is not checked yet."""
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


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
