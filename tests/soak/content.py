"""Computes the correct content of every block and answer of a soak, as pure functions of the
tokens.

The bytes of a full block follow from its key. The bytes of a partial block follow from the key that
it would have if it ended there. So every byte can be checked in every place, and a block of another
prompt, tenant or layer is as wrong as a flipped bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.types import BlockKey

VOCABULARY = 4000
LAYOUT = BlockLayout(
    model_fingerprint="soak",
    dtype="float32",
    block_tokens=16,
    num_layers=3,
    num_kv_heads=1,
    head_dim=64,
)
_DIGEST_BYTES = 64


def slice_bytes(key: BlockKey, layer: int) -> bytes:
    digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES, key=bytes([layer])).digest()
    return digest * (LAYOUT.slice_bytes // _DIGEST_BYTES)


def names(tokens: Sequence[int], tenant: str) -> list[BlockKey]:
    """Returns the keys of a sequence's full blocks, and a name for its last, partial block."""
    root = root_key(LAYOUT.fingerprint, tenant)
    keys = block_keys(tokens, LAYOUT.block_tokens, root)
    rest = tokens[len(keys) * LAYOUT.block_tokens :]
    if rest:
        parent = keys[-1] if keys else root
        text = ",".join(map(str, rest)).encode()
        keys.append(BlockKey(hashlib.sha256(b"partial" + parent + text).digest()[:16]))
    return keys


def next_token(tokens: Sequence[int], tenant: str) -> int:
    return next_of(names(tokens, tenant)[-1])


def next_of(name: BlockKey) -> int:
    """Returns the token that follows a sequence whose last block has this name."""
    return int.from_bytes(hashlib.sha256(b"token" + name).digest()[:4], "little") % VOCABULARY


def answer(prompt: Sequence[int], tenant: str, num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, tenant))
    return tokens[len(prompt) :]
