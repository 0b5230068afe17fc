"""From messages, text or token ids to the prompts the head is asked to continue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.api.bodies import ChatBody, CompletionBody, missing_parameter
from moonpool.api.errors import ApiError
from moonpool.api.frontend import ModelCard
from moonpool.api.messages import plain_messages
from moonpool.api.sampling import check_token_ids, context_exceeded
from moonpool.engine.tokenizer import ChatTemplateError, Tokenizer

_MOST_CHARS_PER_TOKEN = 512
"""No token of any known vocabulary is longer, so a text above this cannot fit the context."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the client sent, for `echo`; None where it sent token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


class PromptReader:
    """Tokenises with one tokenizer, for one model."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard, thread_above_chars: int):
        self._tokenizer = tokenizer
        self._card = card
        self._thread_above_chars = thread_above_chars

    async def read_chat(self, body: ChatBody) -> list[Prompt]:
        if body.messages is None:
            raise missing_parameter("messages")
        text = self.chat_text(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=None if body.tool_choice == "none" else body.tools,
            arguments=_template_arguments(body),
        )
        token_ids = await self.encode(text, bool(body.add_special_tokens), "messages")
        if not token_ids:
            raise ApiError("The messages hold no text.", param="messages")
        return [Prompt(token_ids, text)]

    async def read_completion(self, body: CompletionBody, most_prompts: int) -> list[Prompt]:
        prompt = body.prompt
        if prompt is None:
            raise missing_parameter("prompt")
        sources: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
        if sources and isinstance(sources[0], int):
            sources = [sources]
        if len(sources) > most_prompts:
            text = f"At most {most_prompts} prompts fit one request; this one has {len(sources)}."
            raise ApiError(text, param="prompt")
        if not sources:
            raise ApiError("'prompt' must not be empty.", param="prompt")
        add_special_tokens = body.add_special_tokens is not False
        num_chars = sum(len(source) for source in sources if isinstance(source, str))
        return [await self._read_one(s, add_special_tokens, num_chars) for s in sources]

    async def _read_one(self, source: Any, add_special_tokens: bool, num_chars: int) -> Prompt:
        if not source:
            raise ApiError("'prompt' must not be empty.", param="prompt")
        if isinstance(source, str):
            token_ids = await self.encode(source, add_special_tokens, "prompt", num_chars)
            if not token_ids:
                raise ApiError("'prompt' has no tokens.", param="prompt")
            return Prompt(token_ids, source)
        if not isinstance(source, list) or not all(isinstance(token, int) for token in source):
            raise ApiError(
                "Invalid type for 'prompt': a string, a list of strings, a list of token ids or a "
                "list of lists of token ids is expected.",
                param="prompt",
                code="invalid_type",
            )
        check_token_ids(source, self._card.vocab_size, "prompt")
        return Prompt(tuple(source))

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> str:
        plain = plain_messages(messages)
        for name in arguments:
            if not name.isidentifier() or name in _OWN_ARGUMENTS:
                text = f"'chat_template_kwargs' may not hold {name[:40]!r}."
                raise ApiError(text, param="chat_template_kwargs")
        try:
            return self._tokenizer.render_chat(plain, add_generation_prompt, tools, **arguments)
        except ChatTemplateError as error:
            raise ApiError(str(error), param="messages", code="chat_template_error") from None

    async def encode(
        self, text: str, add_special_tokens: bool, param: str, num_chars: int = 0
    ) -> tuple[int, ...]:
        """Long texts are tokenised in a thread: the event loop streams other answers meanwhile.

        `num_chars`: of all the texts of the call, when there are several.
        """
        if len(text) > self._card.max_model_tokens * _MOST_CHARS_PER_TOKEN:
            raise context_exceeded(None, self._card.max_model_tokens, param)
        encode = self._tokenizer.encode
        if max(len(text), num_chars) > self._thread_above_chars:
            token_ids = tuple(await asyncio.to_thread(encode, text, add_special_tokens))
        else:
            token_ids = tuple(encode(text, add_special_tokens))
        if self._tokenizer.vocab_size > self._card.vocab_size:  # the model lacks some of its tokens
            check_token_ids(token_ids, self._card.vocab_size, param)
        return token_ids


_OWN_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return arguments
