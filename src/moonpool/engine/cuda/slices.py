"""The inside of a layer slice on a GPU ("rows-v1"): whole rows, as its attention reads them.

A slice is K, then V, each [block_tokens][kv_heads][head_dim]. Never allocates, never computes.
"""

from __future__ import annotations

from torch import Tensor

from moonpool.engine.ops import KvCache


def key_rows(cache: KvCache, layer: int) -> Tensor:
    """K of all blocks, shared: [num_blocks, block_tokens, kv_heads, head_dim]."""
    return _rows(cache, _slices(cache, layer)[:, : cache.layout.slice_elements // 2])


def value_rows(cache: KvCache, layer: int) -> Tensor:
    """V of all blocks, shared: [num_blocks, block_tokens, kv_heads, head_dim]."""
    return _rows(cache, _slices(cache, layer)[:, cache.layout.slice_elements // 2 :])


def _slices(cache: KvCache, layer: int) -> Tensor:
    return cache.blocks[:, layer - cache.first_layer]


def _rows(cache: KvCache, half: Tensor) -> Tensor:
    own = cache.layout
    rows: Tensor = half.unflatten(1, (own.block_tokens, own.num_kv_heads, own.head_dim))
    return rows
