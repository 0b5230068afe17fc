"""Block keys: key_i = H(key_{i-1}, tokens_i), with a root for each layout and tenant.

Equal keys mean equal whole prefixes, computed by the same weights in the same layout for the same
tenant. So a key alone shows that a block can be reused (Mooncake v3 Fig. 3, FAST'25 section 3). The
hash is SHA-256, so that no tenant can construct a collision with another tenant's prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import cast

from moonpool.types import BlockKey, salt_part

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
