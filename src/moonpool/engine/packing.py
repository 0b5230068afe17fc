"""How packed parts of a model get their weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.ops import Linear, Ops
from moonpool.engine.quantized.matrix import Matrix, stacked
from moonpool.engine.spec import ModelSpec


class Weights(Protocol):
    """Loads tensors by their Hugging Face names, in the model's dtype.

    Each call returns a new tensor, so that no second copy of the model stays in memory.
    """

    def load(self, name: str) -> Tensor: ...

    def matrix(self, name: str) -> Matrix:
        """The weight of a linear or an embedding: quantized, if it is stored so, else a tensor."""
        ...


def norm_weight(spec: ModelSpec, weights: Weights, name: str) -> Tensor:
    """A norm's weight as `Ops` takes it: float32, with the offset of the checkpoint's format."""
    return weights.load(name).float().add_(spec.norm_offset)


def packed(weights: Weights, ops: Ops, names: list[str], has_bias: bool) -> Linear:
    """One linear of the modules `names`, whose outputs follow each other."""
    weight = stacked([weights.matrix(f"{name}.weight") for name in names])
    bias = torch.cat([weights.load(f"{name}.bias") for name in names]) if has_bias else None
    return ops.linear(weight, bias)
