"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TextStream(Protocol):
    """Incremental detokeniser of one answer: never yields half a character."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, "" if none."""
        ...

    def flush(self) -> str:
        """What is left at the end (an incomplete character becomes U+FFFD)."""
        ...


class TokenizerError(ValueError):
    """A model's tokenizer cannot be loaded; the text says what is missing and what to do."""


class ChatTemplateError(ValueError):
    """A chat template that does not compile, or that messages do not fit; the text says why."""


class Tokenizer(Protocol):
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """Those that stand for no text."""
    tool_template: str
    """The source of the chat template that tells the model of tools."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (for `logprobs`); may be part of a character."""
        ...

    def stream(self, skip_special_tokens: bool = True) -> TextStream: ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        """Applies the chat template. Raises `ChatTemplateError`."""
        ...
