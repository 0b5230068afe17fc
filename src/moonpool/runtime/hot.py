"""The prefixes a cluster uses most, as plain JSON values, from what its instances said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moonpool.conductor.conductor import Conductor
from moonpool.types import BlockKey

MAX_LISTED_BLOCKS = 16_384
"""Of which one instance may speak, when people ask."""


@dataclass(slots=True)
class _Prefix:
    num_uses: int
    num_tokens: int
    num_bytes: int


def describe_hot(conductor: Conductor, num_prefixes: int) -> list[dict[str, Any]]:
    """The most used first. Uses are summed over the instances that have it listed; where it lies is
    what the index says, of its last block."""
    found: dict[BlockKey, _Prefix] = {}
    for state in conductor.instances.values():
        if state.hot is None:
            continue
        layout = state.info.layout
        for prefix in state.hot.prefixes:
            size = len(prefix.keys)
            one = found.setdefault(
                prefix.keys[-1],
                _Prefix(0, size * layout.block_tokens, size * layout.block_bytes),
            )
            one.num_uses += prefix.num_uses
    ranked = sorted(found.items(), key=lambda item: (-item[1].num_uses, -item[1].num_tokens))
    return [_describe(conductor, key, one) for key, one in ranked[:num_prefixes]]


def _describe(conductor: Conductor, key: BlockKey, prefix: _Prefix) -> dict[str, Any]:
    holders = conductor.index.holders_of(key)
    return {
        "key": key.hex(),
        "tokens": prefix.num_tokens,
        "bytes": prefix.num_bytes,
        "hits": prefix.num_uses,
        "replicas": len(holders),
        "dram": [name for name, on_ssd in holders if not on_ssd],
        "ssd": [name for name, on_ssd in holders if on_ssd],
    }
