"""`/v1/responses`: the body, the chat completion it stands for, and the JSON of the response.

The server stores no responses: each call repeats the conversation in its `input`, as agent
frameworks do. Fields that need an earlier response, or a tool that runs on the server, are
rejected. A response is a list of items: reasoning, messages and tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from moonpool.api.bodies import ChatBody, JsonSchemaFormat, ResponseFormat, missing_parameter
from moonpool.api.choice import Choice, Delta
from moonpool.api.connection.kept_stream import StreamFacts
from moonpool.api.errors import ApiError
from moonpool.api.output_text.said import ToolCallDelta
from moonpool.api.sampling import check_range
from moonpool.api.shapes import ChatShape
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import FinishReason, Token


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(msgspec.Struct):
    """How much the model shall reason, as far as its chat template can tell it. Other fields, such
    as `summary`, have no effect."""

    effort: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, and the additional fields that chat completions have."""

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
    include: list[str] | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningOptions | None = None
    # Without effect on a self-hosted model, where nothing is stored, except that `prompt_cache_key`
    # may name the program.
    max_tool_calls: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    context_management: Any = None
    personality: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None
    # The program (agent) of the call; see `api.program_identity`.
    vllm_xargs: Any = None
    agent_hint: Any = None
    # These fields are accepted only with a value that has no effect.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _INCLUDED_LOGPROBS in (self.include or ())


_INCLUDED_LOGPROBS = "message.output_text.logprobs"


def as_chat(body: ResponsesBody) -> ChatBody:
    """Converts the body to that of a chat completion. Raises `ApiError`."""
    for name in ("background", "conversation", "previous_response_id", "prompt"):
        if getattr(body, name):
            text = f"This server stores no responses, so '{name}' is not supported. Leave it out."
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
        reasoning_effort=body.effort,
        tools=None if body.tools is None else [_tool(i, t) for i, t in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
        prompt_cache_key=body.prompt_cache_key,
        vllm_xargs=body.vllm_xargs,
        agent_hint=body.agent_hint,
    )


def of_input(error: ApiError) -> ApiError:
    """Returns an error of the chat's messages as an error of `input`."""
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
    reasoning = ""  # reasoning for the assistant's next message or call
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            kept = {k: v for k, v in item.items() if k in ("role", "content")}
            is_own = kept.get("role") == "assistant"
            messages.append(kept | _reasoning_field(reasoning if is_own else ""))
        elif kind == "function_call":
            _add_call(messages, item, where, reasoning)
        elif kind == "function_call_output":
            output = item.get("output")
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":
            text = f"'{where}' has type {str(kind)[:40]!r}, which this server does not support."
            raise ApiError(text, param=f"{where}.type")
        found = (reasoning, _reasoning_of(item, where)) if kind == "reasoning" else ()
        reasoning = "\n".join(filter(None, found))
    return messages


def _reasoning_field(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning} if reasoning else {}


def _reasoning_of(item: dict[str, Any], where: str) -> str:
    """Returns the text of a reasoning item, or "" if it has only a summary, as hidden reasoning
    does."""
    parts = item.get("content") or []
    if isinstance(parts, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    where = f"{where}.content"
    raise ApiError(f"'{where}' must be a list of parts with text.", param=where)


def _add_call(
    messages: list[dict[str, Any]], item: dict[str, Any], where: str, reasoning: str
) -> None:
    """Adds a tool call to the assistant's message before it, in the form of chats."""
    if not isinstance(item.get("name"), str):
        raise ApiError(f"'{where}' must have a function name.", param=f"{where}.name")
    function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if reasoning or not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None} | _reasoning_field(reasoning))
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        where = f"tools[{number}]"
        text = f"'{where}' has type {str(tool.get('type'))[:40]!r}; only 'function' is supported."
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


_encode = msgspec.json.encode
_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}
_ITEM_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant"},
    "reasoning": {"summary": []},
}
Item = dict[str, Any]


class ResponseWriter:
    """Writes one response: `events` for its increments, `whole` for its current state."""

    def __init__(
        self,
        response_id: str,
        model: str,
        body: ResponsesBody,
        choice: Choice,
        facts: StreamFacts,
        tokenizer: Tokenizer,
    ) -> None:
        self._id = response_id
        self._model = model
        self._body = body
        self._choice = choice
        self._created_s = facts.created_s
        self._next_id = facts.id_source(-1)  # tool calls use the id sources of their choices
        self._shape = ChatShape(tokenizer)
        self._items: list[Item] = []
        self._open = False  # whether the last item may grow
        self._texts: list[str] = []  # texts of the last item
        self._number = 0

    def begin(self) -> bytes:
        whole = self.whole()
        return b"".join(
            self._event(f"response.{name}", response=whole) for name in ("created", "in_progress")
        )

    def events(self, delta: Delta) -> bytes:
        parts: list[bytes] = []
        for said in delta.in_order():
            if said.reasoning:
                self._add_text("reasoning", said.reasoning, parts)
            if said.text:
                self._add_text("message", said.text, parts, self._logprobs(said.tokens))
            for call in said.calls:
                self._call(call, parts)
        if delta.finish_reason is not None:
            if not self._items:
                self._add_text("message", "", parts)
            self._close(parts, cut=delta.finish_reason is FinishReason.LENGTH)
        return b"".join(parts)

    def end(self) -> bytes:
        whole = self.whole()
        return self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def whole(self) -> dict[str, Any]:
        body, choice = self._body, self._choice
        reason = choice.finish_reason
        status, incomplete = "in_progress", None
        if reason is not None:
            status = "completed"
        if reason is FinishReason.LENGTH:
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        sampling = choice.request.sampling
        wanted = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if wanted is None else _without_nulls(wanted)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else self._usage(),
            "user": None,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        num_prompt_tokens = len(choice.request.token_ids)
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": choice.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": num_prompt_tokens + choice.num_tokens,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> list[Any]:
        if not self._body.wants_logprobs:
            return []
        found: list[Any] = self._shape.logprobs(tokens, ())["content"]
        return found

    def _add_text(
        self,
        kind: Literal["message", "reasoning"],
        text: str,
        parts: list[bytes],
        logprobs: Sequence[Any] = (),
    ) -> None:
        is_message = kind == "message"
        if not self._open or self._items[-1]["type"] != kind:
            self._close(parts)
            item: Item = {
                "type": kind,
                "id": f"{_ID_PREFIXES[kind]}_{self._next_id()}",
                "status": "in_progress",
                "content": [],
                **_ITEM_FIELDS[kind],
            }
            self._add(item, parts)
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if is_message:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            parts.append(self._of_part("response.content_part.added", part=part))
        self._texts.append(text)
        if text and is_message:
            self._items[-1]["content"][0]["logprobs"] += logprobs
            delta = "response.output_text.delta"
            parts.append(self._of_part(delta, delta=text, logprobs=logprobs))
        elif text:
            parts.append(self._of_part("response.reasoning_text.delta", delta=text))

    def _call(self, call: ToolCallDelta, parts: list[bytes]) -> None:
        if call.name is not None:
            self._close(parts)
            item: Item = {
                "type": "function_call",
                "id": f"fc_{self._next_id()}",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            self._add(item, parts)
        if call.arguments:
            self._texts.append(call.arguments)
            parts.append(
                self._of_item("response.function_call_arguments.delta", delta=call.arguments)
            )

    def _add(self, item: Item, parts: list[bytes]) -> None:
        self._items.append(item)
        self._open, self._texts = True, []
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.added", output_index=index, item=item))

    def _close(self, parts: list[bytes], cut: bool = False) -> None:
        """Ends the last item."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = "incomplete" if cut else "completed"
        text = "".join(self._texts)
        if item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            done = "response.output_text.done"
            parts.append(self._of_part(done, text=text, logprobs=part["logprobs"]))
            parts.append(self._of_part("response.content_part.done", part=part))
        elif item["type"] == "reasoning":
            part = item["content"][0]
            part["text"] = text
            parts.append(self._of_part("response.reasoning_text.done", text=text))
            parts.append(self._of_part("response.content_part.done", part=part))
        else:
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            parts.append(self._of_item(done, arguments=text, name=item["name"]))
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.done", output_index=index, item=item))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _without_nulls(wanted: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return {name: value for name, value in found.items() if value is not None}
