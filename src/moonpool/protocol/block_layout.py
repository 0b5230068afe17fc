"""Layout and key of a KVCache block: the unit of the engine's cache, of pools and of transfers.

A block holds `block_tokens` tokens for all layers of one shard, layer-major: [num_layers, slice].
One layer is a contiguous slice of `slice_bytes` bytes at offset `layer * slice_bytes`. The engine
defines the inside of a slice; `inner` names that format, and is part of the fingerprint.

Full blocks have keys: key_i = H(key_{i-1}, tokens_i), with a root for each layout and tenant. Equal
keys mean equal whole prefixes, computed by the same weights in the same layout for the same tenant.
So a key alone tells whether a block can be reused (Mooncake v3 Fig. 3, FAST'25 section 3). The hash
is SHA-256, of which a key has the first `KEY_BYTES` bytes, so that no tenant can construct a
collision with another tenant's prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from moonpool.types import BlockKey, Struct, salt_part

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FP8 = "fp8"
LATENT = "latent-v1"
"""The `inner` of blocks without V: what attention reads as a value is a part of its key (MLA)."""


class BlockLayout(Struct, frozen=True):
    """Dimensions of a block. `model_fingerprint` identifies the weights that computed it, and
    `arithmetic` the operations: other kernels or instruction sets give other last bits."""

    model_fingerprint: str
    dtype: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    inner: str = "paired-v1"
    arithmetic: str = ""
    kv_dtype: str = "auto"  # dtype of K and V: "fp8", or "auto" for `dtype`

    @property
    def is_latent(self) -> bool:
        """Whether keys contain their values."""
        return self.inner == LATENT

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are e4m3, with one byte of scale for each token and head."""
        return self.kv_dtype == FP8

    @property
    def key_elements(self) -> int:
        """Elements of K of one layer of one block, over all its tokens and heads."""
        return self.num_kv_heads * self.block_tokens * self.head_dim

    @property
    def slice_elements(self) -> int:
        """Elements of K and V of one layer of one block, over all its tokens and heads; in fp8 the
        scales count as elements too."""
        scales = self.num_kv_heads * self.block_tokens if self.is_fp8 else 0
        return (1 if self.is_latent else 2) * (self.key_elements + scales)

    @property
    def slice_bytes(self) -> int:
        return self.slice_elements * (1 if self.is_fp8 else DTYPE_BYTES[self.dtype])

    @property
    def block_bytes(self) -> int:
        return self.slice_bytes * self.num_layers

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_tokens)

    @property
    def fingerprint(self) -> bytes:
        """Returns 32 bytes, which differ between layouts whose blocks cannot be exchanged."""
        return _fingerprint(self)

    def _hash(self) -> bytes:
        fields = "\0".join(
            str(x)
            for x in (
                "moonpool-block-1",
                self.model_fingerprint,
                self.dtype,
                self.block_tokens,
                self.num_layers,
                self.num_kv_heads,
                self.head_dim,
                self.inner,
                self.arithmetic,
                *((self.kv_dtype,) if self.kv_dtype != "auto" else ()),
            )
        )
        return hashlib.sha256(fields.encode()).digest()


@lru_cache(maxsize=64)
def _fingerprint(layout: BlockLayout) -> bytes:
    return layout._hash()  # the hash is cached, because every request needs it


KEY_BYTES = 16


def root_key(layout_fingerprint: bytes, tenant: str, adapter: str = "") -> BlockKey:
    """Returns the parent key of the first blocks of all prompts of one tenant under one layout, by
    one LoRA adapter."""
    digest = hashlib.sha256(b"moonpool-root-2" if adapter else b"moonpool-root-1")
    if adapter:
        name = adapter.encode("utf-8", "surrogatepass")
        digest.update(len(name).to_bytes(4, "little"))
        digest.update(name)
    digest.update(len(layout_fingerprint).to_bytes(4, "little"))
    digest.update(layout_fingerprint)
    digest.update(salt_part(tenant).encode("utf-8", "surrogatepass"))
    return BlockKey(digest.digest()[:KEY_BYTES])


def extend_keys(
    keys: list[BlockKey], token_ids: Sequence[int], block_tokens: int, root: BlockKey
) -> None:
    """Appends to `keys` the keys of the full blocks of `token_ids` that it lacks."""
    start = len(keys) * block_tokens
    num_full = len(token_ids) // block_tokens
    if num_full <= len(keys):
        return
    parent: bytes = keys[-1] if keys else root
    data = array("I", token_ids[start : num_full * block_tokens]).tobytes()
    width = 4 * block_tokens
    sha256, new = hashlib.sha256, list[bytes]()
    for offset in range(0, len(data), width):
        parent = sha256(parent + data[offset : offset + width]).digest()[:KEY_BYTES]
        new.append(parent)
    keys += cast("list[BlockKey]", new)


def block_keys(token_ids: Sequence[int], block_tokens: int, root: BlockKey) -> list[BlockKey]:
    """Returns the keys of the full blocks of `token_ids`; a last, partial block has none."""
    keys: list[BlockKey] = []
    extend_keys(keys, token_ids, block_tokens, root)
    return keys
