"""The tokenizer of the built-in models: one token is one byte of UTF-8.

Ids 0..255 are bytes; three special tokens follow. In a model with a larger vocabulary every further
id has its number in angle brackets as text, so that every token has a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.text.tokenizer import ByteTextStream
from moonpool.text.tokenizers.chat_template import (
    CONTINUATION_TEMPLATE,
    ChatTemplate,
    WithChatTemplate,
)

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
_SPECIALS = {BOS_ID: b"<bos>", EOS_ID: b"<eos>", PAD_ID: b"<pad>"}
_BYTES = tuple(bytes((value,)) for value in range(256))


class ByteTokenizer(WithChatTemplate):
    """Bytes as tokens. `encode` adds no special tokens; the built-in model needs none."""

    def __init__(self, vocab_size: int = 259):
        if vocab_size < 259:
            raise ValueError(
                f"a byte tokenizer needs a vocabulary of 259 or more, not {vocab_size}"
            )
        self.vocab_size = vocab_size
        self.eos_token_ids: tuple[int, ...] = (EOS_ID,)
        self.special_token_ids = frozenset(_SPECIALS)
        self.tool_template = CONTINUATION_TEMPLATE
        self._chat = ChatTemplate(CONTINUATION_TEMPLATE)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = (
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in _SPECIALS)
        )
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return _BYTES[token_id]
        return _SPECIALS.get(token_id) or b"<%d>" % token_id

    def token_name(self, token_id: int) -> str:
        is_plain = not 0x80 <= token_id < 0x100
        return self.token_bytes(token_id).decode() if is_plain else f"<0x{token_id:02X}>"

    def describe(self) -> dict[str, Any]:
        return {
            "tokenizer_class": type(self).__name__,
            "bos_token": self.token_name(BOS_ID),
            "eos_token": self.token_name(EOS_ID),
            "pad_token": self.token_name(PAD_ID),
            "chat_template": self.tool_template,
        }

    def stream(
        self, skip_special_tokens: bool = True, shown: Mapping[int, str] | None = None
    ) -> ByteTextStream:
        skipped = frozenset(_SPECIALS) if skip_special_tokens else frozenset()
        return ByteTextStream(self.token_bytes, skipped, shown)

    def use_chat_template(self, source: str) -> None:
        self._chat = ChatTemplate(source)
        self.tool_template = source
