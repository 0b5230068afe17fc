"""Finds where checkpoints store layers of linear attention, and heads with gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moonpool_engine.engine.families.stored import StoredTensor
from moonpool_engine.engine.spec import DeltaSpec, ModelSpec

_HALVES = {"q_proj": 0, "g_proj": 1}


def stored_delta(spec: ModelSpec, place: StoredTensor, joined: bool) -> StoredTensor:
    """The place of a tensor of a family with linear attention, if it differs from `place`.

    `joined`: q, k, v and z are one tensor, b and a another, in turns by key head (Qwen3-Next)."""
    assert spec.delta is not None
    delta = spec.delta
    prefix, _, module = place.name.removesuffix(".weight").rpartition(".")
    if module in _HALVES and prefix.endswith("self_attn"):
        shape = (2 * spec.num_heads * spec.head_dim, spec.hidden_size)
        take = partial(_half_of_heads, spec.head_dim, _HALVES[module])
        return StoredTensor(f"{prefix}.q_proj.weight", shape, take)
    if not prefix.endswith("linear_attn"):
        return place
    if module == "conv1d":
        shape3 = (delta.channels, 1, delta.taps)
        return StoredTensor(place.name, shape3, lambda stored: stored.squeeze(1))
    part = module.removeprefix("in_proj_")
    if joined and part in _PARTS:
        own, num_parts = _PARTS[part]
        sizes = _group_sizes(delta)[num_parts]
        total = delta.key_heads * sum(sizes)
        name = f"{prefix}.in_proj_{'qkvz' if num_parts == 4 else 'ba'}.weight"
        return StoredTensor(name, (total, spec.hidden_size), _from_groups(delta, sizes, own))
    return place


_PARTS = {"qkv": ((0, 1, 2), 4), "z": ((3,), 4), "b": ((0,), 2), "a": ((1,), 2)}


def _group_sizes(delta: DeltaSpec) -> dict[int, tuple[int, ...]]:
    """Returns the rows that each part of a joined tensor has per key head, by the number of parts:
    4 for q, k, v and z, 2 for b and a."""
    values = delta.value_heads // delta.key_heads
    own = values * delta.value_dim
    return {4: (delta.key_dim, delta.key_dim, own, own), 2: (values, values)}


def _half_of_heads(head_dim: int, half: int, stored: Tensor) -> Tensor:
    """Returns the half of each head's rows that is its q, or its gate."""
    heads: Tensor = stored.unflatten(0, (-1, 2, head_dim))
    return heads[:, half].flatten(0, 1)


def _from_groups(
    delta: DeltaSpec, sizes: tuple[int, ...], own: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    def take(stored: Tensor) -> Tensor:
        groups = stored.unflatten(0, (delta.key_heads, -1)).split_with_sizes(sizes, dim=1)
        return torch.cat([groups[part].flatten(0, 1) for part in own])

    return take
