"""The inside of a layer slice: where each K and V element of a block lies ("paired-v1").

Owns that order, in plain torch, for whoever needs elements rather than bytes: the reference ops
and the tests. The native kernels walk the same order by address. Never allocates, never computes.

A slice is K, then V. The unit is a 32-bit lane of `pack` neighbours (bfloat16: 2, float32: 1), as
dot-product instructions take lanes: K pairs neighbours in head_dim, V neighbours in tokens.

    K [kv_heads][head_dim / pack][block_tokens][pack]
    V [kv_heads][block_tokens / pack][head_dim][pack]

Where a model is computed in shards ("paired-v1/2": in two), a slice is one such slice per shard,
each with its share of the KV heads, so that a shard's part of it is contiguous.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from moonpool.engine.ops import KvCache
from moonpool.kvcache.layout import DTYPE_BYTES, BlockLayout

INNER = "paired-v1"
ROWS_INNER = "rows-v1"  # what GPUs work on: see `engine.cuda.slices`
LANE_BYTES = 4


def pack(layout: BlockLayout) -> int:
    """Elements in one 32-bit lane."""
    return LANE_BYTES // DTYPE_BYTES[layout.dtype]


def sharded_inner(inner: str, num_shards: int) -> str:
    """The name of that order in so many shards."""
    return inner if num_shards == 1 else f"{inner}/{num_shards}"


def shard_cache(cache: KvCache, shard: int, num_shards: int) -> KvCache:
    """One shard's part of all blocks, shared: to operations, a cache of its own KV heads."""
    own = msgspec.structs.replace(
        cache.layout,
        num_kv_heads=cache.layout.num_kv_heads // num_shards,
        inner=cache.layout.inner.removesuffix(f"/{num_shards}"),
    )
    first = shard * own.slice_elements
    return KvCache(cache.blocks[:, :, first : first + own.slice_elements], own)


def check_layout(layout: BlockLayout) -> None:
    """Refuses, with ValueError, a layout the engine's slices cannot have."""
    inner, _, shards = layout.inner.partition("/")
    divided = shards.isdecimal() and layout.num_kv_heads % int(shards) == 0
    if inner not in (INNER, ROWS_INNER) or (shards and not divided):
        raise ValueError(f"KVCache layout {layout.inner!r} is unknown here: use {INNER!r}")
    if layout.block_tokens % 16:
        raise ValueError(f"block_tokens is {layout.block_tokens}: make it a multiple of 16")
    if layout.head_dim % 16:
        raise ValueError(f"head_dim is {layout.head_dim}: only multiples of 16 are supported")


def cut_of_heads(
    layout: BlockLayout, first: int, count: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The bytes (start, end) of a slice that are K, and those that are V, of so many kv heads; put
    together they are a slice of a layout with these heads alone. ValueError on other layouts."""
    if layout.inner != INNER:
        raise ValueError(f"slices of layout {layout.inner!r} cannot be shared out by head")
    head_bytes = layout.slice_bytes // (2 * layout.num_kv_heads)
    start, end, half = first * head_bytes, (first + count) * head_bytes, layout.slice_bytes // 2
    return (start, end), (half + start, half + end)


def key_view(cache: KvCache, layer: int) -> Tensor:
    """K of all blocks, shared: [num_blocks, kv_heads, head_dim / pack, block_tokens, pack]."""
    own = cache.layout
    lanes = pack(own)
    keys = cache.blocks[:, layer, : own.slice_elements // 2]
    shape = (own.num_kv_heads, own.head_dim // lanes, own.block_tokens, lanes)
    view: Tensor = keys.unflatten(1, shape)
    return view


def value_view(cache: KvCache, layer: int) -> Tensor:
    """V of all blocks, shared: [num_blocks, kv_heads, block_tokens / pack, head_dim, pack]."""
    own = cache.layout
    lanes = pack(own)
    values = cache.blocks[:, layer, own.slice_elements // 2 :]
    shape = (own.num_kv_heads, own.block_tokens // lanes, own.head_dim, lanes)
    view: Tensor = values.unflatten(1, shape)
    return view


def write_rows(
    cache: KvCache, layer: int, block_ids: Tensor, offsets: Tensor, k: Tensor, v: Tensor
) -> None:
    """Stores row t at token `offsets[t]` of block `block_ids[t]`. k, v: [T, kv_heads, head_dim]."""
    lanes = pack(cache.layout)
    block_ids, offsets = block_ids.long(), offsets.long()
    # Index tensors apart from each other put the row dimension first: [T, kv_heads, ...].
    key_view(cache, layer)[block_ids, :, :, offsets, :] = k.unflatten(2, (-1, lanes))
    value_view(cache, layer)[block_ids, :, offsets // lanes, :, offsets % lanes] = v


def read_rows(
    cache: KvCache, layer: int, block_table: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """K and V of the first `num_tokens` tokens of a sequence: [num_tokens, kv_heads, head_dim]."""
    own = cache.layout
    table = block_table[: own.blocks_for(num_tokens)].long()
    shape = (-1, own.num_kv_heads, own.head_dim)
    keys = key_view(cache, layer)[table].permute(0, 3, 1, 2, 4).reshape(shape)
    values = value_view(cache, layer)[table].permute(0, 2, 4, 1, 3).reshape(shape)
    return keys[:num_tokens], values[:num_tokens]
