"""The dense parts of attention: from the normed residual to q, k and v, and from heads back."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.exponential import sigmoid
from moonpool_engine.engine.ops import AttendArgs, Linear, Ops, QkNorm, RopeTable
from moonpool_engine.engine.packing import PlacedWeights, norm_weight, packed
from moonpool_engine.engine.quantized.matrix import reordered
from moonpool_engine.engine.spec import ModelSpec

# epsilon of latents' norms: checkpoints are trained with it, whatever rms_norm_eps is
LATENT_EPS = 1e-6


class HeadsAttention:
    """The projections around grouped-query attention."""

    def __init__(self, spec: ModelSpec, weights: PlacedWeights, ops: Ops, prefix: str) -> None:
        self._ops = ops
        self._eps = spec.rms_eps
        self._gated = spec.gated_heads
        parts = "qkvg" if spec.gated_heads else "qkv"
        self._qkv = packed(weights, ops, [f"{prefix}.{part}_proj" for part in parts], spec.qkv_bias)
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
                self._take_own(spec, q, k)

    def _take_own(self, spec: ModelSpec, q: Tensor, k: Tensor) -> None:
        """Computes q and k of all heads, to norm them; a shard continues with its own heads."""
        shard, num_shards = spec.head_share
        self._widths[:2] = [len(q), len(k)]
        own_q, own_k = (len(norm) // num_shards for norm in (q, k))
        self._own_q = slice(shard * own_q, (shard + 1) * own_q)
        self._own_k = slice(shard * own_k, (shard + 1) * own_k)

    def qkv(self, normed: Tensor) -> Tensor:
        """[T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim], with gates [T, (2 * heads + 2 *
        kv_heads) * head_dim]."""
        qkv = self._qkv(normed)
        if self._whole_norms is None:
            return qkv
        q, k, v = qkv.split_with_sizes(self._widths, dim=1)
        q, k = (
            self._ops.rms_norm(part, weight, self._eps)
            for part, weight in zip((q, k), self._whole_norms, strict=True)
        )
        return torch.cat((q[:, self._own_q], k[:, self._own_k], v), dim=1)

    def store(self, qkv: Tensor, rope: RopeTable, args: AttendArgs) -> Tensor:
        """Rotates q and k, writes k and v into their blocks, returns q [T, heads, head_dim]. If
        the layer has gates, these follow the heads of q in the same dimension."""
        if not self._gated:
            return self._ops.rope_store(qkv, rope, self.qk_norm, args)
        width = sum(self._widths)
        q = self._ops.rope_store(qkv[:, :width], rope, self.qk_norm, args)
        return torch.cat((q, qkv[:, width:].view_as(q)), dim=1)

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Takes what `store` returned, and returns [T, heads * head_dim]."""
        if not self._gated:
            return self._ops.attend(q, args)
        q, gates = q.chunk(2, dim=1)
        out = self._ops.attend(q, args)
        gated: Tensor = out.float() * sigmoid(gates.flatten(1).float())
        return gated.to(out.dtype)

    def project(self, attention: Tensor) -> Tensor:
        """[T, heads * head_dim] -> [T, hidden]."""
        return self._output(attention)


class LatentAttention:
    """The projections around attention over latents (MLA), in absorbed form.

    The queries of each head are projected into the space of the latent, where one KV head serves
    all. The attention operation returns a mean of latents, from which the values of each head
    follow. Prefill and decode use the same computation, so that both give a cached token the same
    bits.
    """

    def __init__(self, spec: ModelSpec, weights: PlacedWeights, ops: Ops, prefix: str) -> None:
        assert spec.latent is not None
        self._ops = ops
        self._latent = latent = spec.latent
        self._num_heads = spec.num_heads
        self._head_dim = spec.head_dim
        self._query_norm: Tensor | None = None
        self._query_down: Linear | None = None
        if latent.query_rank:
            self._query_down = packed(weights, ops, [f"{prefix}.q_a_proj"], spec.qkv_bias)
            self._query_norm = norm_weight(spec, weights, f"{prefix}.q_a_layernorm.weight")
        query = weights.matrix(f"{prefix}.{'q_b_proj' if latent.query_rank else 'q_proj'}.weight")
        order = self._rope_first(query.shape[0], spec.num_heads)
        self._query_up = ops.linear(reordered(query, order), None)
        name = f"{prefix}.kv_a_proj_with_mqa"
        down = weights.matrix(f"{name}.weight")
        order = self._rope_first(down.shape[0], 1)
        bias = weights.load(f"{name}.bias")[order] if spec.qkv_bias else None
        self._down = ops.linear(reordered(down, order), bias)
        self._norm = norm_weight(spec, weights, f"{prefix}.kv_a_layernorm.weight")
        up = weights.load(f"{prefix}.kv_b_proj.weight").unflatten(0, (spec.num_heads, -1))
        self._to_latent = [ops.linear(head[: latent.nope_dim].t(), None) for head in up]
        self._to_value = [ops.linear(head[latent.nope_dim :], None) for head in up]
        self._output = packed(weights, ops, [f"{prefix}.o_proj"], spec.o_bias)

    def _rope_first(self, num_rows: int, num_heads: int) -> Tensor:
        """The order of rows that puts each head's rotated ones first, as halves instead of
        neighbours: [num_rows] int64."""
        rope = self._latent.rope_dim
        heads = torch.arange(num_rows).unflatten(0, (num_heads, -1))
        rest, turned = heads[:, :-rope], heads[:, -rope:]
        if self._latent.interleaved:
            turned = torch.cat((turned[:, ::2], turned[:, 1::2]), dim=1)
        return torch.cat((turned, rest), dim=1).flatten(0, 1)

    def qkv(self, normed: Tensor) -> Tensor:
        """[T, hidden] -> [T, (heads + 1) * head_dim]: latent queries, then the key."""
        latent, rope = self._latent, self._latent.rope_dim
        rows = len(normed)
        narrow = normed
        if self._query_down is not None and self._query_norm is not None:
            narrow = self._ops.rms_norm(self._query_down(normed), self._query_norm, LATENT_EPS)
        queries = self._query_up(narrow).view(rows, self._num_heads, rope + latent.nope_dim)
        key = self._down(normed)
        out = normed.new_empty(rows, self._num_heads + 1, self._head_dim)
        out[:, :-1, :rope] = queries[..., :rope]
        for head, linear in enumerate(self._to_latent):
            out[:, head, rope:] = linear(queries[:, head, rope:].contiguous())
        out[:, -1, :rope] = key[:, :rope]
        out[:, -1, rope:] = self._ops.rms_norm(key[:, rope:].contiguous(), self._norm, LATENT_EPS)
        return out.flatten(1)

    def store(self, qkv: Tensor, rope: RopeTable, args: AttendArgs) -> Tensor:
        """Like `HeadsAttention.store`."""
        return self._ops.rope_store(qkv, rope, None, args)

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Like `HeadsAttention.attend`."""
        return self._ops.attend(q, args)

    def project(self, attention: Tensor) -> Tensor:
        """[T, heads * rank] -> [T, hidden]."""
        means = attention.unflatten(1, (self._num_heads, -1))
        values = [linear(means[:, head].contiguous()) for head, linear in enumerate(self._to_value)]
        return self._output(torch.cat(values, dim=1))
