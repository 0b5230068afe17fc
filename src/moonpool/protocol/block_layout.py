"""The layout of a KVCache block: the unit of the engine's cache, of the pools and of transfers.

A block holds `block_tokens` tokens for all layers of one shard, layer-major: [num_layers, slice].
One layer is a contiguous slice of `slice_bytes` bytes at offset `layer * slice_bytes`. The engine
defines the inside of a slice; `inner` names that format, and is part of the fingerprint.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from moonpool.types import Struct

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
    kv_dtype: str = "auto"  # of K and V: "fp8", or "auto" for `dtype`

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
        """32 bytes, which differ between layouts whose blocks cannot be exchanged."""
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
    return layout._hash()  # cached, because every request needs it
