"""The dense parts of attention: from the normed residual to q, k and v, and from heads back."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.ops import Ops, QkNorm
from moonpool.engine.packing import Weights, norm_weight, packed
from moonpool.engine.spec import ModelSpec


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
