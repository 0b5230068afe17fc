"""The tokenizer protocol, its errors, and incremental detokenizers."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The files or data from which a tokenizer is made. `source` is the text of a `tokenizer.json`.

    `special_tokens` are by the names that templates use, such as `bos_token`.
    """

    where: str
    source: str
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    template: str | None = None
    tool_template: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_config.json`, if there is one."""


class TextStream(Protocol):
    """The incremental detokenizer of one answer. `TextStream` never returns part of a character."""

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; may be ""."""
        ...

    def flush(self) -> str:
        """The remaining text at the end; an incomplete character becomes U+FFFD."""
        ...


class TokenizerError(ValueError):
    """A model's tokenizer cannot be loaded; the message says what is missing and what to do."""


class ChatTemplateError(ValueError):
    """The chat template does not compile, or does not accept the messages; the message says why."""


class Vocabulary(Protocol):
    """The text of each token of a model."""

    special_token_ids: frozenset[int]
    """Tokens without text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, possibly part of a character."""
        ...


class Tokenizer(Vocabulary, Protocol):
    """Text to token ids and back, for one model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tool_template: str
    """The source of the chat template that is used for requests with tools."""

    @property
    def knows_tools(self) -> bool:
        """Whether that template describes tools to the model."""
        ...

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns the content of `tokenizer_config.json`, with the chat template in use."""
        ...

    def use_chat_template(self, source: str) -> None:
        """Replaces the chat template."""
        ...

    def check_chat_template(self) -> None:
        """Raises `ChatTemplateError` if it does not compile."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens. Invalid bytes become U+FFFD."""
        ...

    def stream(
        self, skip_special_tokens: bool = True, shown: Mapping[int, str] | None = None
    ) -> TextStream:
        """An incremental detokenizer for one answer. `shown`: other texts of special tokens."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        /,  # positional only, so that a template argument may have any name
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        """Applies the chat template. Raises `ChatTemplateError`."""
        ...


def unlike(first: Tokenizer, second: Tokenizer) -> str:
    """How two vocabularies differ, in words; "" if they are the same."""
    if first.vocab_size != second.vocab_size:
        return f"{second.vocab_size} tokens, not {first.vocab_size}"
    if first.special_token_ids != second.special_token_ids:
        return "its special tokens differ"
    for token_id in range(first.vocab_size):
        one, other = first.token_bytes(token_id), second.token_bytes(token_id)
        if one != other:
            return f"token {token_id} is {other!r}, not {one!r}"
    return ""


_LONGEST_PENDING_TOKENS = 16
_NONE_SHOWN: Mapping[int, str] = {}


class ByteTextStream:
    """For tokenizers in which every token has fixed bytes: exact, at a constant cost per token.

    Invalid bytes become U+FFFD as soon as they are known to be invalid, so that no output of a
    model can delay the stream.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped_ids: frozenset[int],
        shown: Mapping[int, str] | None = None,
    ):
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._shown = shown or _NONE_SHOWN
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._shown:
            return self._decode(b"", True) + self._shown[token_id]
        if token_id in self._skipped_ids:
            return ""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class DiffTextStream:
    """For other tokenizers: decodes the latest tokens again and returns the added text.

    The last returned tokens stay as context for the next ones, because many decoders treat the
    first token of a text differently.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], shown: Mapping[int, str] | None = None
    ):
        self._decode = decode
        self._shown = shown or _NONE_SHOWN
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_pending = len(self._ids) - self._num_context
        if text.endswith("\ufffd") and num_pending < _LONGEST_PENDING_TOKENS:
            return ""
        return self._return_added(text)

    def flush(self) -> str:
        return self._return_added(self._decode(self._ids)) if self._ids else ""

    def _return_added(self, text: str) -> str:
        added = text[len(self._context_text) :]
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return added
