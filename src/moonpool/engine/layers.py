"""The dense parts of one layer: projections before and after attention, norms, and the MLP.

`pack_layer` packs a layer's weights as its `ModelSpec` describes them. No part knows a family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.ops import AttendRule, Gate, Linear, Ops, QkNorm, RopeTable
from moonpool.engine.spec import ModelSpec
from moonpool.engine.tensors import NORMS


class Weights(Protocol):
    """Loads tensors by their Hugging Face names, in the model's dtype.

    Each call returns a new tensor, so that no second copy of the model stays in memory.
    """

    def load(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's packed weights. Norm weights are [hidden] float32; None: no norm there."""

    attention: HeadsAttention
    mlp: GatedMlp
    rope: RopeTable
    rule: AttendRule
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None
    next_norm: Tensor | None  # before the next layer's attention, or the final norm


class HeadsAttention:
    """The projections around grouped-query attention."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, prefix: str) -> None:
        self._ops = ops
        self._eps = spec.rms_eps
        self._qkv = packed(weights, ops, [f"{prefix}.{part}_proj" for part in "qkv"], spec.qkv_bias)
        self._output = packed(weights, ops, [f"{prefix}.o_proj"], spec.o_bias)
        self._widths = [
            heads * spec.head_dim
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        self.qk_norm: QkNorm | None = None
        self._whole_norms: tuple[Tensor, Tensor] | None = None
        if spec.qk_norm:
            q, k = (norm_weight(spec, weights, f"{prefix}.{part}_norm.weight") for part in "qk")
            if spec.qk_norm == "head":
                self.qk_norm = QkNorm(q, k, spec.rms_eps)
            else:
                self._whole_norms = (q, k)

    def qkv(self, normed: Tensor) -> Tensor:
        """[T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]."""
        qkv = self._qkv(normed)
        if self._whole_norms is None:
            return qkv
        q, k, v = qkv.split_with_sizes(self._widths, dim=1)
        q, k = (
            self._ops.rms_norm(part, weight, self._eps)
            for part, weight in zip((q, k), self._whole_norms, strict=True)
        )
        return torch.cat((q, k, v), dim=1)

    def project(self, attention: Tensor) -> Tensor:
        """[T, heads * head_dim] -> [T, hidden]."""
        return self._output(attention)


class GatedMlp:
    """down(activation(gate(x)) * up(x)): [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, prefix: str) -> None:
        self._ops = ops
        self._gate = Gate(spec.activation)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = packed(weights, ops, names, spec.mlp_bias)
        self._down = packed(weights, ops, [f"{prefix}.down_proj"], spec.mlp_bias)

    def __call__(self, normed: Tensor) -> Tensor:
        return self._down(self._ops.glu(self._gate_up(normed), self._gate))


def pack_layer(spec: ModelSpec, weights: Weights, ops: Ops, layer: int, rope: RopeTable) -> Layer:
    """Loads and packs the weights of one layer."""
    prefix = f"model.layers.{layer}"
    names = NORMS[spec.norms]

    def norm(name: str | None, of: str = prefix) -> Tensor | None:
        return None if name is None else norm_weight(spec, weights, f"{of}.{name}.weight")

    if layer == spec.num_layers - 1:
        next_norm = norm("norm", "model")
    else:
        next_norm = norm(names.before_attention, f"model.layers.{layer + 1}")
    return Layer(
        attention=HeadsAttention(spec, weights, ops, f"{prefix}.self_attn"),
        mlp=GatedMlp(spec, weights, ops, f"{prefix}.mlp"),
        rope=rope,
        rule=AttendRule(spec.window_of(layer), spec.score_cap),
        after_attention=norm(names.after_attention),
        before_mlp=norm(names.before_mlp),
        after_mlp=norm(names.after_mlp),
        next_norm=next_norm,
    )


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
