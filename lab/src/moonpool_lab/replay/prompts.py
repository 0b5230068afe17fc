"""Makes prompts for a trace's rows that share prefixes exactly as its hash ids do.

The tokens of a block follow from its id alone, and an id stands for a whole prefix. So two prompts
have equal tokens as far as they have equal ids. Without block ids, no two prompts share a prefix.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from moonpool.trace.row import TraceRow

KEPT_BLOCKS = 8192
PRIVATE_BLOCK_TOKENS = 512
WORDS = tuple(
    word
    for line in (
        "time year people way day man thing woman life child world school state family student",
        "group country problem hand part place case week company system program question work",
        "number night point home water room mother area money story fact month lot right study",
        "book eye job word business issue side kind head house service friend father power hour",
        "game line end member law",
    )
    for word in line.split()
)
"""Common words, each one token in most vocabularies, for servers that take no token ids."""


class PromptMaker:
    """Makes prompts of token ids below `vocab_size`, or of words if `as_text`."""

    def __init__(
        self, block_tokens: int, vocab_size: int, seed: int = 0, as_text: bool = False
    ) -> None:
        assert vocab_size >= 2
        self.block_tokens = block_tokens or PRIVATE_BLOCK_TOKENS
        self._vocab_size = vocab_size
        self._seed = seed
        self._as_text = as_text
        self._encoded = lru_cache(maxsize=KEPT_BLOCKS)(self._encode)

    def json(self, row: TraceRow, number: int) -> bytes:
        """Returns the prompt of the `number`-th request as a JSON value."""
        size = self.block_tokens
        full, rest = divmod(row.input_tokens, size)
        names = self._names(row, number, full + bool(rest))
        parts = [self._encoded(name) for name in names[:full]]
        if rest:
            parts.append(self._join(self._tokens(names[full])[:rest]))
        if self._as_text:
            return b'"' + b" ".join(parts) + b'"'
        return b"[" + b",".join(parts) + b"]"

    def token_ids(self, row: TraceRow, number: int) -> list[int]:
        """Returns the same prompt as a list of token ids."""
        size = self.block_tokens
        names = self._names(row, number, -(-row.input_tokens // size))
        return [t for name in names for t in self._tokens(name)][: row.input_tokens]

    def _names(self, row: TraceRow, number: int, count: int) -> list[bytes]:
        if row.hash_ids:
            assert len(row.hash_ids) >= count, "fewer hash ids than the prompt has blocks"
            return [b"block %d" % i for i in row.hash_ids[:count]]
        return [b"request %d block %d" % (number, i) for i in range(count)]

    def _tokens(self, name: bytes) -> list[int]:
        salted = b"%d %b" % (self._seed, name)
        drawn = memoryview(hashlib.shake_128(salted).digest(4 * self.block_tokens)).cast("I")
        if self._as_text:
            return [value % len(WORDS) for value in drawn]
        return [value % self._vocab_size for value in drawn]

    def _encode(self, name: bytes) -> bytes:
        return self._join(self._tokens(name))

    def _join(self, tokens: list[int]) -> bytes:
        if self._as_text:
            return b" ".join(WORDS[token].encode() for token in tokens)
        return ",".join(map(str, tokens)).encode()
