"""How packed parts of a model get their weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.ops import Linear, Ops
from moonpool.engine.spec import ModelSpec


class Weights(Protocol):
    """Loads tensors by their Hugging Face names, in the model's dtype.

    Each call returns a new tensor, so that no second copy of the model stays in memory.
    """

    def load(self, name: str) -> Tensor: ...


def norm_weight(spec: ModelSpec, weights: Weights, name: str) -> Tensor:
    """A norm's weight as `Ops` takes it: float32, with the offset of the checkpoint's format."""
    return weights.load(name).float().add_(spec.norm_offset)


def packed(weights: Weights, ops: Ops, names: list[str], has_bias: bool) -> Linear:
    """One linear of the modules `names`, whose outputs follow each other."""
    weight = _fused([weights.load(f"{name}.weight") for name in names])
    bias = _fused([weights.load(f"{name}.bias") for name in names]) if has_bias else None
    return ops.linear(weight, bias)


def _fused(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
