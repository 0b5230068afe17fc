"""Marks: the texts by which a format of output tells its parts, and how they look to a reader.

A mark may be a special token, which has no text in most answers. A reader sees it as one surrogate,
a character that no decoded text has. So a special token is never mistaken for text, and text that
spells a special token is never mistaken for that token.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from moonpool.text.tokenizer import Vocabulary

_FIRST_SIGN = 0xD800


class MarkSigns:
    """How the marks of one format look in one model's outputs. `shown`: the signs of special
    tokens.

    `tokens`: the marks that are single tokens, special or not.
    """

    def __init__(
        self, vocabulary: Vocabulary, marks: Collection[str], are_skipped: bool = True
    ) -> None:
        """`marks`: all marks of the format. `are_skipped`: whether special tokens have no text in
        an answer."""
        self.shown: dict[int, str] = {}
        self.tokens = frozenset(
            mark for mark in marks if len(vocabulary.encode(mark, add_special_tokens=False)) == 1
        )
        self._signs: dict[str, str] = {}
        joined = "\n".join(marks)
        for token_id in sorted(vocabulary.special_token_ids) if are_skipped else ():
            text = vocabulary.token_bytes(token_id).decode("utf-8", "replace")
            if text and text in joined:
                sign = self._signs.setdefault(text, chr(_FIRST_SIGN + len(self._signs)))
                self.shown[token_id] = sign
        self._texts = {ord(sign): text for text, sign in self._signs.items()}

    def of(self, text: str) -> str:
        """Returns a mark in the form in which a reader sees it."""
        for special in sorted(self._signs, key=len, reverse=True):
            text = text.replace(special, self._signs[special])
        return text

    def spelled(self, text: str) -> str:
        """Returns a text with its special tokens written out."""
        return text if text.isascii() else text.translate(self._texts)


def is_special(mark: str) -> bool:
    """Whether a mark is a special token, which no text can imitate."""
    return len(mark) == 1 and "\ud800" <= mark <= "\udfff"


class Marks:
    """Several marks that are searched for together."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        self._firsts = frozenset(mark[0] for mark in self.texts)
        # most characters of an incomplete mark
        self._most_chars = max(map(len, self.texts), default=1) - 1
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def overlap(self, text: str, at: int) -> int:
        """Returns how many of the last characters may be the beginning of a mark."""
        tail = text[max(at, len(text) - self._most_chars) :]
        if not self._most_chars or self._firsts.isdisjoint(tail):
            return 0
        return max([overlap(text, mark, at) for mark in self.texts])


def overlap(text: str, mark: str, at: int = 0) -> int:
    """Returns how many of the last characters, from `at` on, may be the beginning of the mark."""
    begin = text.find(mark[0], max(at, len(text) - len(mark) + 1))
    while begin >= 0:
        if mark.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(mark[0], begin + 1)
    return 0
