"""Converts chat messages, text or token ids to prompts of token ids, and checks them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.api.bodies import ChatBody, CompletionBody, missing_parameter
from moonpool.api.errors import ApiError
from moonpool.api.frontend import ModelCard
from moonpool.api.sampling import check_token_ids, context_exceeded
from moonpool.engine.tokenizer import ChatTemplateError, Tokenizer

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
    """Returns the messages with plain strings as content. Raises an `ApiError` with the place."""
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
        text = f"'{where}' has type '{kind[:40]}', but this server supports only text content."
        raise ApiError(text, param=f"{where}.type")
    value = part.get(_TEXT_PARTS[kind])
    if not isinstance(value, str):
        raise ApiError(f"'{where}' has no text.", param=f"{where}.text")
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Decodes the arguments of tool calls: JSON text on the wire, values in chat templates."""
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
                raise ApiError(f"'{at}' is not valid JSON.", param=at) from None
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


_MOST_CHARS_PER_TOKEN = 512
"""No token of a known vocabulary is longer, so a longer text cannot fit the context."""


class PromptReader:
    """Reads the prompts of calls with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard, thread_above_chars: int):
        self._tokenizer = tokenizer
        self._card = card
        self._thread_above_chars = thread_above_chars

    async def read_chat(self, body: ChatBody) -> tuple[int, ...]:
        """Returns the token ids of a chat's prompt. Raises ApiError for messages that are absent,
        are not valid or have no text, and for a prompt that no context can hold."""
        if body.messages is None:
            raise missing_parameter("messages")
        text = self.chat_text(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=self._shown_tools(body),
            arguments=_template_arguments(body),
        )
        token_ids = await self.encode(text, bool(body.add_special_tokens), "messages")
        if not token_ids:
            raise ApiError("The messages contain no text.", param="messages")
        return token_ids

    def _shown_tools(self, body: ChatBody) -> Sequence[dict[str, Any]] | None:
        """Returns the tools that the template receives.

        A required call is held to its schema, so it needs no template that knows tools.
        """
        must_call = body.tool_choice == "required" or isinstance(body.tool_choice, dict)
        if body.tool_choice == "none" or (must_call and not self._tokenizer.knows_tools):
            return None
        return body.tools

    async def read_completion(
        self, body: CompletionBody, most_prompts: int, param: str = "prompt"
    ) -> list[tuple[int, ...]]:
        """`param` is the field's name in the client's body. Raises ApiError."""
        prompt = body.prompt
        if prompt is None:
            raise missing_parameter(param)
        sources = _sources(prompt)
        if len(sources) > most_prompts:
            text = f"'{param}' may hold at most {most_prompts} prompts, not {len(sources)}."
            raise ApiError(text, param=param)
        if not sources:
            raise ApiError(f"'{param}' must not be empty.", param=param)
        add_special_tokens = body.add_special_tokens is not False
        num_chars = sum(len(source) for source in sources if isinstance(source, str))
        return [await self._read_one(s, add_special_tokens, num_chars, param) for s in sources]

    def echoes(self, body: CompletionBody, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        """Returns the text of each prompt: what the client sent, or its token ids decoded."""
        assert body.prompt is not None
        return [
            source if isinstance(source, str) else self._tokenizer.decode(token_ids)
            for source, token_ids in zip(_sources(body.prompt), prompts, strict=True)
        ]

    async def _read_one(
        self, source: Any, add_special_tokens: bool, num_chars: int, param: str
    ) -> tuple[int, ...]:
        if not source:
            raise ApiError(f"'{param}' must not be empty.", param=param)
        if isinstance(source, str):
            token_ids = await self.encode(source, add_special_tokens, param, num_chars)
            if not token_ids:
                raise ApiError(f"'{param}' has no tokens.", param=param)
            return token_ids
        if not isinstance(source, list) or not all(isinstance(token, int) for token in source):
            raise ApiError(
                f"Invalid type for '{param}': a string, a list of strings, a list of token ids or "
                "a list of lists of token ids is expected.",
                param=param,
                code="invalid_type",
            )
        check_token_ids(source, self._card.vocab_size, param)
        return tuple(source)

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> str:
        """Renders the chat template. Raises ApiError for content that is not text, for an argument
        that the template may not get, and where the template fails."""
        plain = plain_messages(messages)
        for name in arguments:
            if not name.isidentifier() or name in _OWN_ARGUMENTS:
                text = f"'chat_template_kwargs' must not contain {name[:40]!r}."
                raise ApiError(text, param="chat_template_kwargs")
        try:
            return self._tokenizer.render_chat(plain, add_generation_prompt, tools, **arguments)
        except ChatTemplateError as error:
            raise ApiError(str(error), param="messages", code="chat_template_error") from None

    def history_text(self, messages: Sequence[dict[str, Any]]) -> str:
        """Renders messages to which no answer is to follow. Raises ApiError."""
        return self.chat_text(messages, add_generation_prompt=False, tools=None, arguments={})

    async def encode(
        self, text: str, add_special_tokens: bool, param: str, num_chars: int = 0
    ) -> tuple[int, ...]:
        """Tokenises a text. A long one is tokenised in a thread, so that streams go on meanwhile.

        `num_chars` is the length of all texts of the call, if there are several. `param` is the
        field that an error names. Raises ApiError for a text that no context can hold, and for a
        token that the model lacks.
        """
        if len(text) > self._card.max_model_tokens * _MOST_CHARS_PER_TOKEN:
            raise context_exceeded(None, self._card.max_model_tokens, param)
        encode = self._tokenizer.encode
        if max(len(text), num_chars) > self._thread_above_chars:
            token_ids = tuple(await asyncio.to_thread(encode, text, add_special_tokens))
        else:
            token_ids = tuple(encode(text, add_special_tokens))
        if self._tokenizer.vocab_size > self._card.vocab_size:  # the model lacks some tokens
            check_token_ids(token_ids, self._card.vocab_size, param)
        return token_ids


def _sources(prompt: str | list[str | int | list[int]]) -> Sequence[Any]:
    """Returns the prompts of a `prompt` field, which may be one text or one list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else prompt


_OWN_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return arguments
