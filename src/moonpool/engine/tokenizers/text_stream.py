"""Incremental detokenisers. They own the bytes of an unfinished character, and nothing else."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_LONGEST_PENDING_TOKENS = 16


class ByteTextStream:
    """For tokenizers whose every token stands for fixed bytes: exact, and the same cost per token.

    Invalid bytes become U+FFFD as soon as they are known to be invalid, so that nothing a model
    emits can hold the stream back.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped_ids: frozenset[int]):
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class DiffTextStream:
    """For any other tokenizer: decodes the latest tokens anew, and gives out what was added.

    The tokens already given out stay as context for the next ones, because many decoders treat the
    first token of a text differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_pending = len(self._ids) - self._num_context
        if text.endswith("\ufffd") and num_pending < _LONGEST_PENDING_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        return self._give_out(self._decode(self._ids)) if self._ids else ""

    def _give_out(self, text: str) -> str:
        added = text[len(self._context_text) :]
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return added
