"""The keys of a vLLM request's blocks: a hash chain over all that makes a block's content.

The group (model, layout) is not part of the chain: each group has tables of its own in the pool.
The chain begins with the cache salt and the adapter's content. Each block adds what its tokens do
not identify: images and other embeddings. vLLM's own block hashes are not used: they depend on a
seed, and name an adapter instead of its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from moonpool.protocol.block_layout import KEY_BYTES, extend_keys, root_key
from moonpool.types import BlockKey

ContentOf = Callable[[Any], str | None]
"""The content of the adapter that a LoRARequest names; None if its blocks have no keys."""


class PromptKeys:
    """The keys of one request's full blocks, extended as it grows."""

    def __init__(self, request: Any, block_tokens: int, content_of: ContentOf) -> None:
        self.keys: list[BlockKey] = []
        self._request = request
        self._block_tokens = block_tokens
        self._content_of = content_of
        self._adapter = _adapter_of(request, content_of)
        self._root = root_of(request, self._adapter or "")
        self._media = sorted(
            (
                feature.mm_position.offset,
                feature.mm_position.offset + feature.mm_position.length,
                str(feature.identifier),
            )
            for feature in (getattr(request, "mm_features", None) or ())
        )

    @property
    def is_known(self) -> bool:
        """Whether content follows from tokens, media and adapter. Embeddings as a prompt have no
        key."""
        if getattr(self._request, "prompt_embeds", None) is not None or self._adapter is None:
            return False
        return self._adapter == _adapter_of(self._request, self._content_of)

    def extend(self, num_blocks: int, first: int = 0) -> list[BlockKey]:
        """Returns the keys of blocks `first` to `num_blocks` - 1, as far as their tokens are
        known."""
        if self.is_known and len(self.keys) < num_blocks:
            self._append(num_blocks)
        return self.keys[first:num_blocks]

    def _append(self, num_blocks: int) -> None:
        size, tokens, start = self._block_tokens, self._request.all_token_ids, len(self.keys)
        num_full = min(num_blocks, len(tokens) // size)
        if not self._media:
            parent = self.keys[-1] if self.keys else self._root
            new: list[BlockKey] = []
            extend_keys(new, tokens[start * size : num_full * size], size, parent)
            self.keys += new
            return
        for index in range(start, num_full):
            parent = self.keys[-1] if self.keys else self._root
            parent = self._with_media(parent, index * size, (index + 1) * size)
            extend_one: list[BlockKey] = []
            extend_keys(extend_one, tokens[index * size : (index + 1) * size], size, parent)
            self.keys += extend_one

    def _with_media(self, parent: BlockKey, start: int, end: int) -> BlockKey:
        """The parent of a block that contains parts of images."""
        inside = [one for one in self._media if one[0] < end and one[1] > start]
        if not inside:
            return parent
        digest = hashlib.sha256(b"moonpool-media-1" + parent)
        for first, last, identifier in inside:
            digest.update(f"{first - start} {last - start} {len(identifier)} ".encode())
            digest.update(identifier.encode())
        return BlockKey(digest.digest()[:KEY_BYTES])


def root_of(request: Any, adapter: str = "") -> BlockKey:
    """Returns the parent of a request's first block, from cache salt and the adapter's content.

    A salt that already is a root key (16 bytes in hexadecimal, as moonpool's own front sends) is
    used unchanged, so that the front and the pool give a block the same key.
    """
    salt = getattr(request, "cache_salt", None) or ""
    try:
        own = bytes.fromhex(salt)
    except ValueError:
        own = b""
    if len(own) == KEY_BYTES and len(salt) == 2 * KEY_BYTES and not adapter:
        return BlockKey(own)
    return root_key(b"moonpool-vllm", salt, adapter)


def _adapter_of(request: Any, content_of: ContentOf) -> str | None:
    """Returns the content of the request's adapter, empty without one, None if it is unknown."""
    lora = getattr(request, "lora_request", None)
    return "" if lora is None else content_of(lora)
