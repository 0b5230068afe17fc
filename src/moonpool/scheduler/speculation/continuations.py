"""Remembers what came next after a chain of cached blocks: the tokens of the block that followed
it.

A block's name is the hash of its tokens and of all tokens before it, rooted in the tenant's salt.
So a request finds only continuations of exactly its own text, in requests of its own tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moonpool.kvcache.block_pool import BlockPool
from moonpool.types import BlockKey, Tokens


class Continuations:
    """The newest known successor of each block, for as long as it is in the pool."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._next: OrderedDict[BlockKey, tuple[BlockKey, tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def note(self, keys: Sequence[BlockKey], tokens: Tokens, start: int, end: int) -> None:
        """Remembers blocks `start` to `end` - 1 of a request's text."""
        size = self._block_tokens
        for index in range(max(start, 1), end):
            text = tuple(tokens.between(index * size, (index + 1) * size))
            self._next[keys[index - 1]] = (keys[index], text)
            self._next.move_to_end(keys[index - 1])
        while len(self._next) > self._pool.num_blocks:
            self._next.popitem(last=False)

    def draft(self, keys: Sequence[BlockKey], tokens: Tokens, num_tokens: int) -> tuple[int, ...]:
        """Returns up to `num_tokens` tokens that followed this text before, or () if none are
        known. `keys`: the keys of the text's full blocks."""
        index = (tokens.size - 1) // self._block_tokens  # index of the block with the newest token
        if not 0 < index <= len(keys):
            return ()
        own = tuple(tokens.between(index * self._block_tokens, tokens.size))
        key, found = keys[index - 1], list[int]()
        while len(found) < num_tokens:
            entry = self._next.get(key)
            if entry is None:
                break
            after, text = entry
            if self._pool.find(after) is None:
                del self._next[key]  # the following block was evicted
                break
            if text[: len(own)] != own:
                break
            found += text[len(own) :]
            key, own = after, ()
        return tuple(found[:num_tokens])

    def forget(self) -> None:
        """Forgets everything."""
        self._next.clear()
