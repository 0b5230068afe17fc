"""How packed parts of a model get their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moonpool_engine.engine.lora.linear import LoraPacker
from moonpool_engine.engine.ops import Linear, Ops
from moonpool_engine.engine.quantized.matrix import Matrix, stacked
from moonpool_engine.engine.spec import ModelSpec


class Weights(Protocol):
    """Loads tensors by their Hugging Face names, in the model's dtype.

    Each call returns a new tensor, so that the memory holds no second copy of the model.
    """

    def load(self, name: str) -> Tensor: ...

    def matrix(self, name: str) -> Matrix:
        """Returns the weight of a linear or an embedding: quantized if it is stored in that form,
        or else a tensor."""
        ...


class PlacedWeights:
    """A model's weights, moved to a device as they are loaded, and the adapters beside them."""

    def __init__(self, weights: Weights, device: torch.device, lora: LoraPacker) -> None:
        self._weights = weights
        self._device = device
        self._lora = lora

    def load(self, name: str) -> Tensor:
        return self._weights.load(name).to(self._device)

    def matrix(self, name: str) -> Matrix:
        on_cpu = self._device.type == "cpu"
        return self._weights.matrix(name) if on_cpu else self.load(name)

    def adapted(self, linear: Linear, modules: Sequence[tuple[str, int]]) -> Linear:
        """Returns the linear with its adapters; `modules` as in `LoraPacker.adapted`."""
        return self._lora.adapted(linear, modules)


def norm_weight(spec: ModelSpec, weights: Weights, name: str) -> Tensor:
    """A norm's weight as `Ops` takes it: float32, with the offset of the checkpoint's format."""
    return weights.load(name).float().add_(spec.norm_offset)


def packed(weights: PlacedWeights, ops: Ops, names: list[str], has_bias: bool) -> Linear:
    """Returns one linear of the modules `names`, whose outputs follow each other."""
    parts = [weights.matrix(f"{name}.weight") for name in names]
    bias = torch.cat([weights.load(f"{name}.bias") for name in names]) if has_bias else None
    sizes = [part.shape[0] for part in parts]
    linear = ops.linear(stacked(parts), bias)
    return weights.adapted(linear, list(zip(names, sizes, strict=True)))
