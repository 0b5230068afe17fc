"""Converts chat messages, text or token ids to prompts of token ids, and checks them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from moonpool.api.bodies import (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    GenerationBody,
    missing_parameter,
)
from moonpool.api.errors import ApiError
from moonpool.api.sampling import LONGEST_STOP_CHARS, check_token_ids, context_exceeded
from moonpool.api.serving_backend import ModelCard
from moonpool.text.tokenizer import ChatTemplateError, Tokenizer
from moonpool.types import BadWord


class Truncation(NamedTuple):
    """`num_tokens`: most tokens that are kept. `side`: the side from which tokens are cut off."""

    num_tokens: int
    side: Literal["left", "right"]

    def cut(self, token_ids: Sequence[int], num_before: int = 0, num_after: int = 0) -> list[int]:
        """Returns the tokens that are kept. The first `num_before` and the last `num_after` tokens
        are not part of the text. These tokens are kept if at least one token of the text also
        fits."""
        ids = list(token_ids)
        if len(ids) <= self.num_tokens:
            return ids
        inner = ids[num_before : len(ids) - num_after]
        before, after = ids[:num_before], ids[len(ids) - num_after :] if num_after else []
        room = self.num_tokens - len(before) - len(after)
        if room <= 0:
            return self._one_side(ids, self.num_tokens)
        return [*before, *self._one_side(inner, room), *after]

    def cut_text(self, text: str, most_chars_per_token: int) -> str:
        """Returns a part of a long text that contains all tokens to keep."""
        most = self.num_tokens * most_chars_per_token
        if len(text) <= most:
            return text
        return text[-most:] if self.side == "left" else text[:most]

    def _one_side(self, ids: list[int], count: int) -> list[int]:
        return ids[len(ids) - count :] if self.side == "left" else ids[:count]


def truncation_of(
    body: GenerationBody | EmbeddingsBody, max_model_tokens: int, num_output_tokens: int | None
) -> Truncation | None:
    """Returns how prompts are shortened, or None if they are not. Raises ApiError.

    `num_output_tokens`: the tokens that the call asks for, or None if it generates none. A length
    of -1 keeps as many tokens as fit beside the output.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return None
    generates = num_output_tokens is not None
    most = max_model_tokens - 1 if generates else max_model_tokens
    if wanted != -1 and not 1 <= wanted <= most:
        text = (
            f"Invalid value for 'truncate_prompt_tokens': {str(wanted)[:40]}. It must be -1, or "
            f"between 1 and {most}."
        )
        raise ApiError(text, param="truncate_prompt_tokens")
    if wanted == -1:
        wanted = max_model_tokens - max(num_output_tokens or 0, int(generates))
        if wanted < 1:
            text = (
                f"'truncate_prompt_tokens' leaves no prompt: {num_output_tokens} tokens of output "
                f"take the whole context of {max_model_tokens}. Lower 'max_tokens'."
            )
            raise ApiError(text, param="truncate_prompt_tokens")
    return Truncation(wanted, body.truncation_side or ("left" if generates else "right"))


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_messages(messages: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the messages with plain strings as content. Raises an `ApiError` that names the
    message and the part."""
    if not messages:
        raise ApiError("'messages' must hold at least one message.", param="messages")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields that moonpool does not know reach the chat template, which may read them."""
    role = message.get("role")
    if role is None:
        raise ApiError(f"'{where}' has no role.", param=f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        expected = ", ".join(sorted(ROLES))
        text = f"Invalid value for '{where}.role': expected one of {expected}."
        raise ApiError(text, param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text_of(message.get("content"), role, message, where)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    if role == "assistant":
        _name_reasoning(plain, where)
    return plain


def _name_reasoning(plain: dict[str, Any], where: str) -> None:
    """Gives the reasoning of an earlier answer all the field names that templates use for it."""
    given = plain.get("reasoning_content", plain.get("reasoning"))
    if given is None:
        return
    if not isinstance(given, str):
        name = f"{where}.reasoning_content"
        raise ApiError(f"'{name}' must be a string.", param=name, code="invalid_type")
    plain |= {"reasoning_content": given, "reasoning": given}
    # gpt-oss accepts only one of the two fields
    if not (plain["content"] and plain.get("tool_calls")):
        plain["thinking"] = given


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
        if isinstance(arguments, dict):
            arguments = _Arguments(arguments)
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


class _Arguments(dict[str, Any]):
    """The arguments of one tool call. Most templates take an object; some, such as DeepSeek's, join
    the arguments with text, where their JSON is used."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


InThread = Callable[..., Awaitable[Any]]
"""Like `asyncio.to_thread`."""
MOST_BAD_WORDS = 1024
_MOST_CHARS_PER_TOKEN = 512
"""Known vocabularies have no longer token, so a longer text cannot fit the context."""


class PromptReader:
    """Reads the prompts of calls with one model's tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        card: ModelCard,
        thread_above_chars: int,
        in_thread: InThread = asyncio.to_thread,
    ):
        self._tokenizer = tokenizer
        self._in_thread = in_thread
        self._card = card
        self._thread_above_chars = thread_above_chars

    async def read_chat(self, body: ChatBody) -> tuple[int, ...]:
        """Returns the token ids of a chat's prompt. Raises ApiError for messages that are absent,
        are not valid or have no text, and for a prompt that no context can hold."""
        if body.messages is None:
            raise missing_parameter("messages")
        text = self.chat_text(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=self._shown_tools(body),
            arguments=_template_arguments(body),
        )
        wanted = body.max_tokens or 0
        if body.max_completion_tokens is not None:
            wanted = body.max_completion_tokens
        truncation = truncation_of(body, self._card.max_model_tokens, wanted)
        return await self._read_text(text, bool(body.add_special_tokens), truncation)

    async def read_embedded_chat(self, body: EmbeddingsBody) -> tuple[int, ...]:
        """Returns the token ids of messages to be embedded. Raises the same errors as
        `read_chat`."""
        text = self.chat_text(
            body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            tools=None,
            arguments=body.chat_template_kwargs or {},
        )
        truncation = truncation_of(body, self._card.max_model_tokens, None)
        return await self._read_text(text, bool(body.add_special_tokens), truncation)

    async def _read_text(
        self, text: str, add_special_tokens: bool, truncation: Truncation | None
    ) -> tuple[int, ...]:
        """Returns the token ids of a rendered chat."""
        token_ids = await self.encode(text, add_special_tokens, "messages", truncation=truncation)
        if not token_ids:
            raise ApiError("The messages contain no text.", param="messages")
        return token_ids

    def _shown_tools(self, body: ChatBody) -> Sequence[dict[str, Any]] | None:
        """Returns the tools that the template receives, or None.

        A required call is constrained by its schema, so it needs no template that knows tools.
        """
        must_call = body.tool_choice == "required" or isinstance(body.tool_choice, dict)
        if body.tool_choice == "none" or (must_call and not self._tokenizer.knows_tools):
            return None
        return body.tools

    async def read_completion(
        self, body: CompletionBody, most_prompts: int
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt. Raises ApiError."""
        most, wanted = self._card.max_model_tokens, body.max_tokens or 0
        truncation = truncation_of(body, most, wanted)
        return await self.read_texts(body, most_prompts, "prompt", truncation)

    async def read_texts(
        self,
        body: CompletionBody,
        most_prompts: int,
        param: str,
        truncation: Truncation | None,
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of each text. `param`: the name of the field in the client's body,
        for errors. Raises ApiError."""
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
        how = add_special_tokens, num_chars, param, truncation
        return [await self._read_one(source, *how) for source in sources]

    def echoes(self, body: CompletionBody, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        """Returns the text of each prompt: what the client sent, or its token ids decoded."""
        assert body.prompt is not None
        is_whole = body.truncate_prompt_tokens is None
        return [
            source if is_whole and isinstance(source, str) else self._tokenizer.decode(token_ids)
            for source, token_ids in zip(_sources(body.prompt), prompts, strict=True)
        ]

    def bad_words(self, words: Sequence[str]) -> tuple[BadWord, ...]:
        """Returns the words with their tokens, as vLLM finds them: at the beginning of a text, and
        after a space if the first token then differs. Raises ApiError."""
        if len(words) > MOST_BAD_WORDS:
            raise ApiError(
                f"'bad_words' may hold at most {MOST_BAD_WORDS} words.", param="bad_words"
            )
        return tuple(self._bad_word(word) for word in dict.fromkeys(words))

    def _bad_word(self, word: str) -> BadWord:
        if len(word) > LONGEST_STOP_CHARS:
            text = f"A word of 'bad_words' may have at most {LONGEST_STOP_CHARS} characters."
            raise ApiError(text, param="bad_words")
        alone, behind = (
            tuple(self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not alone:
            raise ApiError(
                f"A word of 'bad_words' has no tokens: {word[:40]!r}.", param="bad_words"
            )
        found = [alone]
        if len(behind) == len(alone) and behind[0] != alone[0]:
            found.append(behind)
        for token_ids in found:
            check_token_ids(token_ids, self._card.vocab_size, "bad_words")
        return BadWord(word, tuple(found))

    async def _read_one(
        self,
        source: Any,
        add_special_tokens: bool,
        num_chars: int,
        param: str,
        truncation: Truncation | None,
    ) -> tuple[int, ...]:
        if not source:
            raise ApiError(f"'{param}' must not be empty.", param=param)
        if isinstance(source, str):
            how = add_special_tokens, param, num_chars, truncation
            token_ids = await self.encode(source, *how)
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
        return tuple(source if truncation is None else truncation.cut(source))

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        tools: Sequence[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> str:
        """Renders the chat template for these messages. Raises ApiError for content that is not
        text, for an argument that the template may not get, and where the template fails.

        `add_generation_prompt`: None means true, unless the last message is continued.
        """
        if add_generation_prompt and continue_final_message:
            text = "'continue_final_message' needs 'add_generation_prompt' to be false or left out."
            raise ApiError(text, param="continue_final_message")
        adds = add_generation_prompt is not False and not continue_final_message
        plain = plain_messages(messages)
        for name in arguments:
            if not name.isidentifier() or name in _OWN_ARGUMENTS:
                text = f"'chat_template_kwargs' must not contain {name[:40]!r}."
                raise ApiError(text, param="chat_template_kwargs")
        final = mark_final(plain) if continue_final_message else ""
        try:
            rendered = self._tokenizer.render_chat(plain, adds, tools, **arguments)
            return cut_at_mark(rendered, final) if continue_final_message else rendered
        except ChatTemplateError as error:
            raise ApiError(str(error), param="messages", code="chat_template_error") from None

    def history_text(self, messages: Sequence[dict[str, Any]]) -> str:
        """Renders messages without the beginning of an answer. Raises ApiError."""
        return self.chat_text(
            messages,
            add_generation_prompt=False,
            continue_final_message=False,
            tools=None,
            arguments={},
        )

    async def encode(
        self,
        text: str,
        add_special_tokens: bool,
        param: str,
        num_chars: int = 0,
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Tokenises a text. A long text is tokenised in a thread, so that streams continue
        meanwhile.

        `num_chars` is the length of all texts of the call, if it has several. `param` is the field
        that an error names. Raises ApiError for a text that no context can hold, and for a token
        that the model lacks.
        """
        if truncation is not None:
            text = truncation.cut_text(text, _MOST_CHARS_PER_TOKEN)
        if len(text) > self._card.max_model_tokens * _MOST_CHARS_PER_TOKEN:
            raise context_exceeded(None, self._card.max_model_tokens, param)
        encode = self._tokenizer.encode
        if max(len(text), num_chars) > self._thread_above_chars:
            token_ids = tuple(await self._in_thread(encode, text, add_special_tokens))
        else:
            token_ids = tuple(encode(text, add_special_tokens))
        if truncation is not None and len(token_ids) > truncation.num_tokens:
            around = self._special_around(token_ids) if add_special_tokens else (0, 0)
            token_ids = tuple(truncation.cut(token_ids, *around))
        # the model lacks some tokens of the tokenizer
        if self._tokenizer.vocab_size > self._card.vocab_size:
            check_token_ids(token_ids, self._card.vocab_size, param)
        return token_ids

    def _special_around(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Returns how many of the tokens the tokenizer has put before and after every text."""
        added = self._tokenizer.encode("")
        before = next(
            (n for n, (a, b) in enumerate(zip(added, token_ids, strict=False)) if a != b),
            len(added),
        )
        after = len(added) - before
        return (
            (before, after)
            if list(token_ids[len(token_ids) - after :]) == added[before:]
            else (0, 0)
        )


def _sources(prompt: str | list[str | int | list[int]]) -> Sequence[Any]:
    """Returns the prompts of a `prompt` field, which may be one text or one list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else prompt


_OWN_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    """Returns the arguments of the template. Some templates read the effort, and others only
    whether the model may reason; so both are given, as in vLLM."""
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
        arguments.setdefault("enable_thinking", body.reasoning_effort != "none")
    return arguments


_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


def mark_final(plain: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's content, and returns the content. Raises ApiError."""
    content: str = plain[-1]["content"]
    if not content:
        where = f"messages[{len(plain) - 1}].content"
        text = f"'continue_final_message' needs text to continue, but '{where}' has none."
        raise ApiError(text, param=where)
    plain[-1] = plain[-1] | {"content": content + _MARK}
    return content


def cut_at_mark(rendered: str, final: str) -> str:
    """Returns a rendered chat up to the end of its last message, like transformers: without the
    space at the end of the message if the template removes it."""
    before, mark, after = rendered.rpartition(_MARK.rstrip())
    if not mark or final.strip() not in before:
        text = (
            "The chat template does not show the text of the last message, so"
            " 'continue_final_message' cannot be served."
        )
        raise ApiError(text, param="continue_final_message", code="chat_template_error")
    return before if after.startswith(" ") else before.rstrip()
