"""Finds where each token begins in the text of its choice, as OpenAI's `text_offset` of
completions."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.text.tokenizer import Tokenizer
from moonpool.types import Token


class TextOffsets:
    """Counts the characters of one text, token by token.

    A token that completes no character has the offset of the character that it belongs to. A
    special token has an offset, but no characters unless the text shows it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        """`start`: the number of characters before the first token."""
        self._stream = tokenizer.stream(skip_special_tokens)
        self._position = start

    def of(self, tokens: Sequence[Token]) -> list[int]:
        """Returns the offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._position)
            self._position += len(self._stream.push(token.token_id))
        return found


def prompt_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the offsets of a prompt's tokens in its text, which may lack special tokens, and the
    space that some tokenizers put before it."""
    stream = tokenizer.stream(skip_special_tokens=False)
    position, found = 0, []
    for token_id in token_ids:
        found.append(min(position, len(text)))
        said = stream.push(token_id)
        if text.startswith(said, position):
            position += len(said)
        elif said.startswith(" ") and text.startswith(said[1:], position):
            position += len(said) - 1
        elif token_id not in tokenizer.special_token_ids:  # a rewritten text
            position += len(said)
    return found
