"""What clients send to `/v1/responses`, and the chat that it means.

The server keeps no responses: a turn brings all that was said before in its `input`, as agents'
frameworks do. What would need an earlier response, or a tool that runs here, is refused.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from moonpool.api.bodies import ChatBody, JsonSchemaFormat, ResponseFormat, missing_parameter
from moonpool.api.errors import ApiError
from moonpool.api.sampling import check_range


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, and those of ours that chat completions have, too."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Without effect on what a self-hosted model answers, or on what is kept of it: nothing.
    include: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None
    # Accepted only where they ask for nothing.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    top_logprobs: int | None = None


def as_chat(body: ResponsesBody) -> ChatBody:
    """Raises `ApiError`."""
    for name in ("background", "conversation", "previous_response_id", "prompt", "top_logprobs"):
        if getattr(body, name):
            text = f"This server does not support '{name}': it keeps no responses; leave it out."
            if name == "top_logprobs":
                text = "'top_logprobs' is not supported here; chat completions have it."
            raise ApiError(text, param=name, code="unsupported_parameter")
    if body.input is None:
        raise missing_parameter("input")
    check_range(body, "max_output_tokens", 1, 2**31 - 1)
    return ChatBody(
        model=body.model,
        messages=_messages(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=None if body.tools is None else [_tool(i, t) for i, t in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
    )


def of_input(error: ApiError) -> ApiError:
    """What is wrong with the chat, said of the `input` that it came from."""
    if not (error.param or "").startswith("messages"):
        return error
    text = re.sub(r"'messages(\[\d+\])?", "'input", error.message)
    return ApiError(text, status=error.status, param="input", code=error.code)


def _messages(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            kept = {k: v for k, v in item.items() if k in ("role", "content")}
            messages.append(kept)
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            output = item.get("output")
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":  # what a model thought is not told it again
            text = f"'{where}' is of type {str(kind)[:40]!r}, which this server does not know."
            raise ApiError(text, param=f"{where}.type")
    return messages


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """To the assistant's message before it, as chats have it."""
    if not isinstance(item.get("name"), str):
        raise ApiError(f"'{where}' must hold the name of a function.", param=f"{where}.name")
    function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        where = f"tools[{number}]"
        text = f"'{where}' is of type {str(tool.get('type'))[:40]!r}; only functions are served."
        raise ApiError(text, param=f"{where}.type")
    kept = {k: v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": kept}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchemaFormat(wanted.name, wanted.description, wanted.schema, wanted.strict)
    return ResponseFormat(wanted.type, schema)
