"""Chat messages: checked, and made plain enough for a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.api.errors import ApiError

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_KEYS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "audio",
        "annotations",
        "reasoning",
        "reasoning_content",
    }
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_messages(messages: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages whose content is a string. Raises `ApiError` that names the message."""
    if not messages:
        raise ApiError("'messages' must hold at least one message.", param="messages")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    unknown = message.keys() - _KEYS
    if unknown:
        name = f"{where}.{min(unknown)}"
        raise ApiError(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    role = message.get("role")
    if role is None:
        raise ApiError(f"'{where}' has no role.", param=f"{where}.role")
    if not isinstance(role, str) or role not in _ROLES:
        expected = ", ".join(sorted(_ROLES))
        text = f"Invalid value for '{where}.role': expected one of {expected}."
        raise ApiError(text, param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text_of(message.get("content"), role, message, where)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _text_of(content: Any, role: str, message: dict[str, Any], where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or message.get("refusal")):
            return ""
        raise ApiError(f"'{where}' has no content.", param=f"{where}.content")
    if not isinstance(content, list):
        raise ApiError(
            f"Invalid type for '{where}.content': expected a string or a list of parts.",
            param=f"{where}.content",
            code="invalid_type",
        )
    texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ApiError(f"'{where}' must be an object with a type.", param=where)
    if kind not in _TEXT_PARTS:
        text = f"'{where}' has type '{kind[:40]}', but this model reads text only."
        raise ApiError(text, param=f"{where}.type")
    value = part.get(_TEXT_PARTS[kind])
    if not isinstance(value, str):
        raise ApiError(f"'{where}' has no text.", param=f"{where}.text")
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Arguments travel as JSON text; templates want them as values."""
    if not isinstance(calls, list):
        raise ApiError(f"'{where}' must be a list.", param=where, code="invalid_type")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            at = f"{where}[{index}]"
            raise ApiError(f"'{at}' must hold a function with a name.", param=at)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, RecursionError, ValueError):
                at = f"{where}[{index}].function.arguments"
                raise ApiError(f"'{at}' is not JSON.", param=at) from None
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain
