"""`/v1/messages`, Anthropic's API: the body, the chat completion it stands for, and the response.

`cache_control` has no effect: every prefix is cached. `thinking` has no effect either: the chat
template decides whether the model reasons. The reasoning comes as blocks of thinking, and the
client's blocks go back to the template. Content other than text, thinking and tools is rejected.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from moonpool.api.bodies import ChatBody, JsonSchemaFormat, ResponseFormat, missing_parameter
from moonpool.api.choice import Choice, Delta
from moonpool.api.errors import ApiError
from moonpool.api.output_text.said import ToolCallDelta
from moonpool.types import MALFORMED, FinishReason

_encode = msgspec.json.encode
Block = dict[str, Any]


class MessageToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageTool(msgspec.Struct):
    """A tool that the client runs. Server tools have another `type`."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessageFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessageOutput(msgspec.Struct):
    format: MessageFormat | None = None
    effort: str | None = None


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body from which the prompt is made."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    output_config: MessageOutput | None = None
    # Fields without effect (see the module docstring).
    thinking: Any = None
    cache_control: Any = None


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Any = None
    service_tier: Any = None
    context_management: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    speed: Any = None
    # The program (agent) of the call; see `api.program_identity`.
    vllm_xargs: Any = None
    agent_hint: Any = None


def as_chat(body: CountTokensBody) -> ChatBody:
    """Converts the body to that of a chat completion. Raises `ApiError`."""
    if body.messages is None:
        raise missing_parameter("messages")
    chat = ChatBody(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools)] if body.tools else None,
    )
    choice = body.tool_choice
    if choice is not None:
        chat.tool_choice = _tool_choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    wanted = body.output_config
    if wanted is not None:
        chat.reasoning_effort = wanted.effort
        if wanted.format is not None:
            schema = JsonSchemaFormat(schema=wanted.format.schema)
            chat.response_format = ResponseFormat("json_schema", schema)
    if isinstance(body, MessagesBody):
        if body.max_tokens is None:
            raise missing_parameter("max_tokens")
        chat.max_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
        chat.temperature, chat.top_k, chat.top_p = body.temperature, body.top_k, body.top_p
        chat.vllm_xargs, chat.agent_hint = body.vllm_xargs, body.agent_hint
    return chat


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    assert body.messages is not None
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    for i, message in enumerate(body.messages):
        where, content = f"messages[{i}]", message.get("content")
        if message.get("role") not in ("user", "assistant", "system"):
            text = f"'{where}.role' must be 'user', 'assistant' or 'system'."
            raise ApiError(text, param=f"{where}.role")
        if isinstance(content, str) or content is None:
            messages.append({"role": message["role"], "content": content})
        elif isinstance(content, list):
            messages += _of_blocks(message["role"], content, f"{where}.content")
        else:
            text = f"'{where}.content' must be a string or a list of blocks."
            raise ApiError(text, param=f"{where}.content", code="invalid_type")
    return messages


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Returns the results of tools first, then the text and the calls of the message."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_texts([block], at))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "tool_result":
            content = block.get("content") or ""
            call_id = block.get("tool_use_id")
            result = _texts(content, f"{at}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind == "thinking":
            thoughts.append(_thought(block, at))
        elif kind != "redacted_thinking":  # a block of another server, which has no text
            text = f"'{at}' has type {str(kind)[:40]!r}, which this server does not support."
            raise ApiError(text, param=f"{at}.type")
    if not texts and not calls:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts and role == "assistant":
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"'{where}' may hold only text.", param=where)
    return "\n".join(map(str, texts))


def _thought(block: Block, where: str) -> str:
    text = block.get("thinking")
    if not isinstance(text, str):
        raise ApiError(f"'{where}' has no thinking.", param=f"{where}.thinking")
    return text


def _call(block: Block, where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise ApiError(f"'{where}' must have a tool's name.", param=f"{where}.name")
    function = {"name": block["name"], "arguments": _encode(block.get("input") or {}).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(number: int, tool: MessageTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        where = f"tools[{number}]"
        text = f"'{where}' has type {tool.type[:40]!r}; this server runs no tools itself."
        raise ApiError(text, param=f"{where}.type")
    function = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: MessageToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class MessageWriter:
    """Writes one response: `events` for its increments, `whole` for its current state."""

    def __init__(self, message_id: str, model: str, choice: Choice) -> None:
        self._id = message_id
        self._model = model
        self._choice = choice
        self._blocks: list[Block] = []
        self._open = False  # whether the last block may grow
        self._texts: list[str] = []  # texts of the last block

    def begin(self) -> bytes:
        return self._event("message_start", message=self.whole())

    def events(self, delta: Delta) -> bytes:
        parts: list[bytes] = []
        for said in delta.in_order():
            if said.reasoning:
                self._add_text("thinking", said.reasoning, parts)
            if said.text:
                self._add_text("text", said.text, parts)
            for call in said.calls:
                self._add_call(call, parts)
        if delta.finish_reason is not None:
            self._close(parts)
        return b"".join(parts)

    def end(self) -> bytes:
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        last = self._event("message_delta", delta=stop, usage=self._usage())
        return last + self._event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return self._event("error", error=_error_of(error))

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [shown for block in self._blocks if (shown := _shown(block)) is not None],
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": self._usage(),
        }

    def _stop_reason(self) -> str | None:
        choice = self._choice
        if choice.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if choice.finish_word == "tool_calls":
            return "tool_use"
        if choice.finish_reason is None:
            return None
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        found = self._choice.stop_reason
        return found if isinstance(found, str) else None

    def _usage(self) -> dict[str, Any]:
        """Returns the usage; as at Anthropic, `input_tokens` are the tokens that were not
        cached."""
        choice = self._choice
        return {
            "input_tokens": len(choice.request.token_ids) - choice.cached_tokens,
            "cache_read_input_tokens": choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
        }

    def _add_text(self, kind: Literal["text", "thinking"], text: str, parts: list[bytes]) -> None:
        if not self._open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._add({"type": kind, kind: "", **signature}, parts)
        self._texts.append(text)
        parts.append(self._delta(**{"type": f"{kind}_delta", kind: text}))

    def _add_call(self, call: ToolCallDelta, parts: list[bytes]) -> None:
        if call.name is not None:
            use: Block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            self._add(use, parts)
            self._blocks[-1] = use | {"arguments": ""}
        if call.arguments:
            self._texts.append(call.arguments)
            parts.append(self._delta(type="input_json_delta", partial_json=call.arguments))

    def _add(self, block: Block, parts: list[bytes]) -> None:
        self._close(parts)
        index = len(self._blocks)
        parts.append(self._event("content_block_start", index=index, content_block=block))
        self._blocks.append(block)
        self._open, self._texts = True, []

    def _delta(self, **delta: Any) -> bytes:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self, parts: list[bytes]) -> None:
        if self._open:
            self._open = False
            block = self._blocks[-1]
            field = "arguments" if block["type"] == "tool_use" else block["type"]
            block[field] = "".join(self._texts)
            if block["type"] == "thinking":
                block["signature"] = _signature(block["thinking"])
                parts.append(self._delta(type="signature_delta", signature=block["signature"]))
            parts.append(self._event("content_block_stop", index=len(self._blocks) - 1))

    def _event(self, kind: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _signature(thinking: str) -> str:
    """Returns the signature of a thinking block, which Anthropic's clients send back with it. The
    signature proves nothing, and is not checked."""
    digest = hashlib.blake2b(thinking.encode(), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def _shown(block: Block) -> Block | None:
    """Returns a block of a whole message, or None for a call whose input was cut by
    `max_tokens`."""
    if block["type"] != "tool_use":
        return block
    try:
        found = msgspec.json.decode(block["arguments"] or "{}")
    except MALFORMED:
        return None
    return {key: value for key, value in block.items() if key != "arguments"} | {"input": found}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_of(error: ApiError) -> dict[str, str]:
    otherwise = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": _ERROR_TYPES.get(error.status, otherwise), "message": error.message}


def error_payload(error: ApiError, request_id: str) -> bytes:
    """Returns an error in Anthropic's format."""
    return _encode({"type": "error", "error": _error_of(error), "request_id": request_id})


ErrorPayload = Callable[[ApiError, str], bytes]
