"""The element order inside a block's layer slice: "paired-v1" on the CPU, "rows-v1" on GPUs.

This module reads and writes elements in plain torch, for the reference operations and tests. The
native kernels use the same order by address.

A slice is K, then V. In "paired-v1" the unit is a 32-bit lane of `pack` neighbours (bfloat16: 2,
float32: 1), as dot-product instructions need them: neighbours in head_dim for K, neighbouring
tokens for V.

    K [kv_heads][head_dim / pack][block_tokens][pack]
    V [kv_heads][block_tokens / pack][head_dim][pack]

With shards ("paired-v1/2" has two), a slice consists of one such slice per shard, each with its
share of the KV heads. A shard's part is therefore contiguous.

"latent-v1" has no V: a value is the last elements of its key (MLA). Shards do not divide
"latent-v1": each shard writes the same keys.

In fp8, the elements have the same order and take one byte each. After K and V, a slice then has a
power of two for each token and head, as its exponent plus 127: [K, V][kv_heads][block_tokens].

"rows-v1" has whole rows, as GPU attention reads them: K, then V, each
[block_tokens][kv_heads][head_dim].
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moonpool.protocol.block_layout import DTYPE_BYTES, LATENT, BlockLayout
from moonpool_engine.engine.ops import KvCache, compute_dtype

INNER = "paired-v1"
ROWS_INNER = "rows-v1"
LATENT_INNER = LATENT
LANE_BYTES = 4
MOST_E4M3 = 448.0


def pack(layout: BlockLayout) -> int:
    """Elements in one 32-bit lane."""
    return LANE_BYTES // DTYPE_BYTES[layout.dtype]


def sharded_inner(inner: str, num_shards: int) -> str:
    """The name of the order `inner` in `num_shards` shards."""
    return inner if num_shards == 1 or inner == LATENT_INNER else f"{inner}/{num_shards}"


def shard_cache(cache: KvCache, shard: int, num_shards: int) -> KvCache:
    """A view of one shard's part of all blocks: a cache with only that shard's KV heads."""
    if cache.layout.is_latent:
        return cache
    own = msgspec.structs.replace(
        cache.layout,
        num_kv_heads=cache.layout.num_kv_heads // num_shards,
        inner=cache.layout.inner.removesuffix(f"/{num_shards}"),
    )
    first = shard * own.slice_elements
    return KvCache(cache.blocks[:, :, first : first + own.slice_elements], own)


def check_layout(layout: BlockLayout) -> None:
    """Raises ValueError for a layout that the engine does not support."""
    inner, _, shards = layout.inner.partition("/")
    divided = shards.isdecimal() and layout.num_kv_heads % int(shards) == 0
    if inner not in (INNER, ROWS_INNER, LATENT_INNER) or (shards and not divided):
        raise ValueError(f"KVCache layout {layout.inner!r} is not supported: use {INNER!r}")
    if layout.block_tokens % 16:
        raise ValueError(f"block_tokens is {layout.block_tokens}: make it a multiple of 16")
    if layout.head_dim % 16:
        raise ValueError(f"head_dim is {layout.head_dim}: only multiples of 16 are supported")


def cut_of_heads(layout: BlockLayout, first: int, count: int) -> tuple[tuple[int, int], ...]:
    """The byte ranges (start, end) in a slice of K and of V for `count` KV heads from `first` on,
    and in fp8 those of their scales.

    Joined, the ranges are a slice of a layout with only these heads. Raises ValueError for
    layouts other than "paired-v1".
    """
    if layout.inner != INNER:
        raise ValueError(f"slices of layout {layout.inner!r} cannot be divided by head")
    all_heads = layout.num_kv_heads
    element = 1 if layout.is_fp8 else DTYPE_BYTES[layout.dtype]
    sides = [layout.key_elements // all_heads * element] * 2  # bytes of each head
    if layout.is_fp8:
        sides += [layout.block_tokens] * 2
    ranges, base = [], 0
    for head_bytes in sides:
        ranges.append((base + first * head_bytes, base + (first + count) * head_bytes))
        base += all_heads * head_bytes
    return tuple(ranges)


def key_view(cache: KvCache, layer: int) -> Tensor:
    """A view of K in all blocks: [num_blocks, kv_heads, head_dim / pack, block_tokens, pack]."""
    own = cache.layout
    lanes = pack(own)
    keys = cache.blocks[:, layer, : own.key_elements]
    shape = (own.num_kv_heads, own.head_dim // lanes, own.block_tokens, lanes)
    view: Tensor = keys.unflatten(1, shape)
    return view


def value_view(cache: KvCache, layer: int) -> Tensor:
    """A view of V in all blocks: [num_blocks, kv_heads, block_tokens / pack, head_dim, pack]."""
    own = cache.layout
    lanes = pack(own)
    values = cache.blocks[:, layer, own.key_elements : 2 * own.key_elements]
    shape = (own.num_kv_heads, own.block_tokens // lanes, own.head_dim, lanes)
    view: Tensor = values.unflatten(1, shape)
    return view


def write_rows(
    cache: KvCache, layer: int, block_ids: Tensor, offsets: Tensor, k: Tensor, v: Tensor
) -> None:
    """Stores row t at token `offsets[t]` of block `block_ids[t]`. k, v: [T, kv_heads, head_dim]."""
    lanes = pack(cache.layout)
    block_ids, offsets = block_ids.long(), offsets.long()
    if cache.layout.is_fp8:
        scales = scale_view(cache, layer)
        k, scales[block_ids, 0, :, offsets] = to_fp8(k)
        if not cache.layout.is_latent:
            v, scales[block_ids, 1, :, offsets] = to_fp8(v)
    # Index tensors that are not adjacent move the row dimension first: [T, kv_heads, ...].
    key_view(cache, layer)[block_ids, :, :, offsets, :] = k.unflatten(2, (-1, lanes))
    if cache.layout.is_latent:
        return
    value_view(cache, layer)[block_ids, :, offsets // lanes, :, offsets % lanes] = v


def read_rows(
    cache: KvCache, layer: int, block_table: Tensor, num_tokens: int, value_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """K and V of the first `num_tokens` tokens of a sequence: [num_tokens, kv_heads, head_dim].

    Of a latent cache, V is the last `value_dim` elements of K.
    """
    own = cache.layout
    table = block_table[: own.blocks_for(num_tokens)].long()
    shape = (-1, own.num_kv_heads, own.head_dim)
    keys = key_view(cache, layer)[table].permute(0, 3, 1, 2, 4).reshape(shape)
    if own.is_fp8:
        scales = scale_view(cache, layer)[table].permute(1, 0, 3, 2).flatten(1, 2)
        keys = _from_fp8(keys, scales[0], own)
    if own.is_latent:
        return keys[:num_tokens], keys[:num_tokens, :, own.head_dim - value_dim :]
    values = value_view(cache, layer)[table].permute(0, 2, 4, 1, 3).reshape(shape)
    if own.is_fp8:
        values = _from_fp8(values, scales[1], own)
    return keys[:num_tokens], values[:num_tokens]


def scale_view(cache: KvCache, layer: int) -> Tensor:
    """A view of the scales in all fp8 blocks: [num_blocks, K and V, kv_heads, block_tokens]."""
    own = cache.layout
    sides = 1 if own.is_latent else 2
    scales = cache.blocks[:, layer, sides * own.key_elements :]
    view: Tensor = scales.unflatten(1, (sides, own.num_kv_heads, own.block_tokens))
    return view


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] as e4m3 bytes, and their scales [...] as exponents plus 127.

    The largest element of a row becomes at most 448, the largest e4m3.
    """
    wide = x.float()
    mantissa, exponent = torch.frexp(wide.abs().amax(-1) / MOST_E4M3)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 126)
    exponent = torch.where(mantissa == 0, 0, exponent)
    scaled = torch.ldexp(wide, -exponent.unsqueeze(-1))
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), (exponent + 127).to(torch.uint8)


def _from_fp8(data: Tensor, scales: Tensor, layout: BlockLayout) -> Tensor:
    wide = data.view(torch.float8_e4m3fn).float()
    found = torch.ldexp(wide, scales.int().unsqueeze(-1) - 127)
    return found.to(compute_dtype(layout))


def key_rows(cache: KvCache, layer: int) -> Tensor:
    """A view of K in all "rows-v1" blocks: [num_blocks, block_tokens, kv_heads, head_dim]."""
    return _rows(cache, _slices(cache, layer)[:, : cache.layout.slice_elements // 2])


def value_rows(cache: KvCache, layer: int) -> Tensor:
    """A view of V in all "rows-v1" blocks: [num_blocks, block_tokens, kv_heads, head_dim]."""
    return _rows(cache, _slices(cache, layer)[:, cache.layout.slice_elements // 2 :])


def _slices(cache: KvCache, layer: int) -> Tensor:
    return cache.blocks[:, layer - cache.first_layer]


def _rows(cache: KvCache, half: Tensor) -> Tensor:
    own = cache.layout
    rows: Tensor = half.unflatten(1, (own.block_tokens, own.num_kv_heads, own.head_dim))
    return rows
