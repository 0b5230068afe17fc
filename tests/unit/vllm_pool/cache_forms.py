"""Makes KVCache tensors like vLLM's workers, in each of its physical layouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """The fields of vLLM's specs that the layout reads."""

    block_size: int
    num_kv_heads: int
    state_bytes: int
    dtype: torch.dtype = torch.bfloat16
    tokens_per_state: int = 1

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.state_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 64


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = 32
    page_size_bytes: int = 4096


ORDERS = {  # the physical orders of (layer, block, head, token, content), by vLLM's names
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class Worker:
    """The interface that vLLM gives a connector."""

    kv_caches: dict[str, torch.Tensor] = field(default_factory=dict)
    config: Any = None


def one_group(
    order: str = "LBHNC",
    layers: int = 3,
    blocks: int = 6,
    heads: int = 2,
    tokens: int = 32,
    content: int = 64,
    kernel_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    placed: bool = True,
) -> Worker:
    """Makes a model with full attention, with `content` elements per token and head."""
    item = dtype.itemsize
    spec = FullAttentionSpec(tokens, heads, content * item, dtype)
    kernel = kernel_tokens or tokens
    ratio = tokens // kernel
    sizes = (layers, blocks * ratio, heads, kernel, content)
    raw = torch.arange(torch.Size(sizes).numel() * item) % 251
    raw = raw.to(torch.uint8).view(dtype)
    physical = ORDERS[order]
    places = raw.view([sizes[axis] for axis in physical])
    logical = places.permute([physical.index(axis) for axis in range(5)])
    names = [f"layers.{i}" for i in range(layers)]
    config = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)],
        kv_cache_tensors=[],
    )
    if placed:
        steps = [step * item for step in logical.stride()]
        config.kv_cache_tensors = [
            SimpleNamespace(
                layers=names, layer_stride=steps[0], block_stride=ratio * steps[1], offset=0
            )
        ]
    return Worker(dict(zip(names, logical, strict=True)), config)


def two_groups(blocks: int = 8) -> Worker:
    """Makes a hybrid model: layers of both groups share memory, and a block belongs to one
    group."""
    full, window = FullAttentionSpec(32, 2, 256), SlidingWindowSpec(32, 2, 256)
    raw = torch.randint(0, 250, (2, blocks, 2, 32, 256), dtype=torch.uint8).view(torch.bfloat16)
    names = [[f"{kind}.{i}" for i in range(2)] for kind in ("full", "window")]
    config = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[
            SimpleNamespace(layer_names=n, kv_cache_spec=s)
            for n, s in zip(names, (full, window), strict=True)
        ],
        kv_cache_tensors=[],
    )
    caches = {name: raw[i] for group in names for i, name in enumerate(group)}
    return Worker(caches, config)


def key_and_value_apart(blocks: int = 5) -> Worker:
    """Makes tensors (2, blocks, tokens, heads, size), with K and V as the outer axis, as in earlier
    vLLMs."""
    spec = FullAttentionSpec(16, 2, 2 * 64 * 2)
    tensors = {
        f"layers.{i}": torch.randn(2, blocks, 16, 2, 64).to(torch.bfloat16) for i in range(2)
    }
    config = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[SimpleNamespace(layer_names=list(tensors), kv_cache_spec=spec)],
        kv_cache_tensors=[SimpleNamespace(size=1, shared_by=[name]) for name in tensors],
    )
    return Worker(tensors, config)


def all_orders() -> list[tuple[str, int]]:
    """Returns each order with the number of kernel blocks in a block, which is above 1 only in
    orders with dense blocks."""
    whole = [(order, 1) for order in ORDERS]
    return [*whole, *itertools.product(("LBHNC", "LBNHC"), (2, 4))]
