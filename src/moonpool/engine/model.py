"""The decoder model of all families: each layer is two dense halves around an attention call.

It owns the packed weights and the order of operations. Chunked prefill, layer-wise streaming and
attention offloading all divide a layer at the same points: `qkv`, attend, `output`. The model uses
only the `Ops` protocol. It does not allocate blocks and does not sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.ops import (
    AttendArgs,
    HeadShape,
    KvCache,
    Linear,
    Ops,
    QkNorm,
    RopeTable,
    StepMeta,
)
from moonpool.engine.quantized.matrix import Matrix, lookup, stacked
from moonpool.engine.rope import rope_table
from moonpool.engine.spec import ModelSpec
from moonpool.engine.step import BeforeAttend, LayerDone


class Weights(Protocol):
    """Loads tensors by their Hugging Face names, in the model's dtype.

    Each call returns a new tensor, so that no second copy of the model stays in memory.
    """

    def load(self, name: str) -> Tensor: ...

    def matrix(self, name: str) -> Matrix:
        """The weight of a linear or an embedding: quantized, if it is stored so, else a tensor."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's packed weights. Norm weights are [hidden]."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    post_norm: Tensor
    next_norm: Tensor  # the next layer's input norm, or the final norm
    qk_norm: QkNorm | None


class _Placed:
    """Weights that are moved to a device as they are loaded."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def load(self, name: str) -> Tensor:
        return self._weights.load(name).to(self._device)

    def matrix(self, name: str) -> Matrix:
        on_cpu = self._device.type == "cpu"
        return self._weights.matrix(name) if on_cpu else self.load(name)


class DecoderModel:
    """Weights packed by `ops`, and the forward pass of a step's T rows.

    Between layers a step carries two tensors [T, hidden]: the residual stream, updated in place,
    and its normed copy, the input of the next `qkv`.

    A pipeline stage has only some of the `layers`: the first stage embeds, the last one computes
    logits. A row gets the same bits as in the whole model. Without `edges` the model neither embeds
    nor computes logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        layers: range | None = None,
        edges: bool = True,
        rope: RopeTable | None = None,
    ) -> None:
        """`rope` is given if another part of the model in this process has made the table."""
        self.spec = spec
        self.layers = range(spec.num_layers) if layers is None else layers
        assert self.layers and self.layers.start >= 0 and self.layers.stop <= spec.num_layers
        self.heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._ops = ops
        self._scale = spec.head_dim**-0.5
        if rope is None:
            rope = rope_table(spec.rope, spec.head_dim, spec.max_positions)
            rope = RopeTable(rope.cos.to(ops.device), rope.sin.to(ops.device))
        self.rope = rope
        weights = _Placed(weights, ops.device)
        self._first_norm: Tensor | None = None
        self._embedding: Matrix | None = None
        self._head: Linear | None = None
        if self.begins:
            self._first_norm = weights.load("model.layers.0.input_layernorm.weight")
        self._layers = {i: _pack_layer(spec, weights, ops, i) for i in self.layers}
        if edges and (self.begins or (self.ends and spec.tie_embeddings)):
            self._embedding = weights.matrix("model.embed_tokens.weight")
        if edges and self.ends:
            tied = self._embedding if spec.tie_embeddings else None
            self._head = ops.linear(
                weights.matrix("lm_head.weight") if tied is None else tied, None
            )
        if not self.begins:
            self._embedding = None  # needed only to pack the tied LM head

    @property
    def begins(self) -> bool:
        """Whether it has the model's first layer."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether it has the model's last layer."""
        return self.layers.stop == self.spec.num_layers

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [T] int64 -> residual and normed, each [T, hidden]. First stage only."""
        assert self._embedding is not None
        residual = lookup(self._embedding, token_ids)
        return residual, self.enter(residual)

    def enter(self, residual: Tensor) -> Tensor:
        """Norms the embedded rows: residual [T, hidden] -> the first layer's input, same shape."""
        assert self._first_norm is not None
        return self._ops.rms_norm(residual, self._first_norm, self.spec.rms_eps)

    def qkv(self, layer: int, normed: Tensor) -> Tensor:
        """The first dense half: normed [T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]."""
        return self._layers[layer].qkv(normed)

    def store(self, layer: int, qkv: Tensor, cache: KvCache, meta: StepMeta) -> Tensor:
        """Rotates q and k, writes k and v into their blocks, returns q [T, heads, head_dim].

        qkv: [T, (heads + 2 * kv_heads) * head_dim].
        """
        qk_norm = self._layers[layer].qk_norm
        args = AttendArgs(self.heads, cache, layer, meta, self._scale)
        return self._ops.rope_store(qkv, self.rope, qk_norm, args)

    def attend(self, layer: int, q: Tensor, cache: KvCache, meta: StepMeta) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""
        return self._ops.attend(q, AttendArgs(self.heads, cache, layer, meta, self._scale))

    def output(self, layer: int, attention: Tensor, residual: Tensor) -> Tensor:
        """The second dense half; updates `residual` in place.

        attention [T, heads * head_dim], residual [T, hidden] -> the next normed input [T, hidden].
        """
        normed = self.add_attention(layer, self.project(layer, attention), residual)
        return self.add_mlp(layer, self.mlp(layer, normed), residual)

    # The second half in four parts, between which shards are summed

    def project(self, layer: int, attention: Tensor) -> Tensor:
        """The output projection: [T, heads * head_dim] -> [T, hidden], to add to the residual."""
        return self._layers[layer].output(attention)

    def add_attention(self, layer: int, added: Tensor, residual: Tensor) -> Tensor:
        """Adds the projected attention to `residual` in place; returns the MLP's input.

        All tensors are [T, hidden].
        """
        norm = self._layers[layer].post_norm
        return self._ops.add_rms_norm(added, residual, norm, self.spec.rms_eps)

    def mlp(self, layer: int, normed: Tensor) -> Tensor:
        """What the MLP adds to the residual."""
        own = self._layers[layer]
        return own.down(self._ops.silu_mul(own.gate_up(normed)))

    def add_mlp(self, layer: int, added: Tensor, residual: Tensor) -> Tensor:
        """Adds it to `residual` in place, returns the next layer's input."""
        norm = self._layers[layer].next_norm
        return self._ops.add_rms_norm(added, residual, norm, self.spec.rms_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """The last layer's output [rows, hidden] -> [rows, vocab] float32. Last stage only."""
        assert self._head is not None
        return self._head(normed).float()

    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """Fills the KVCache of the rows and returns the logits of the `wanted` ones, if any.

        token_ids [T] int64, wanted [W] row numbers -> [W, vocab] float32. After its KVCache is
        stored, the last layer computes only the wanted rows, since no other row is read.
        """
        start = self.embed(token_ids)
        done = self.advance(*start, cache, meta, wanted, on_layer, before_attend)
        return None if done is None else self.logits(done[1])

    def advance(
        self,
        residual: Tensor,
        normed: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Runs residual and normed, each [T, hidden], through this model's layers.

        After the model's last layer only the `wanted` rows remain, [W, hidden]; None without them.
        """
        last = self.spec.num_layers - 1
        for layer in self.layers:
            q = self.store(layer, self.qkv(layer, normed), cache, meta)
            if on_layer is not None:
                on_layer(layer)
            if layer == last and wanted is None:
                return None
            if before_attend is not None:
                before_attend(layer)
            attention = self.attend(layer, q, cache, meta)
            if layer == last and wanted is not None and len(wanted) < meta.num_rows:
                attention, residual = attention[wanted], residual[wanted]
            normed = self.output(layer, attention, residual)
        return residual, normed


def _pack_layer(spec: ModelSpec, weights: Weights, ops: Ops, layer: int) -> _Layer:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    next_norm = f"model.layers.{layer + 1}.input_layernorm.weight"
    if layer == spec.num_layers - 1:
        next_norm = "model.norm.weight"

    def linear(names: list[str], has_bias: bool) -> Linear:
        weight = stacked([weights.matrix(f"{name}.weight") for name in names])
        bias = torch.cat([weights.load(f"{name}.bias") for name in names]) if has_bias else None
        return ops.linear(weight, bias)

    qk_norm = None
    if spec.qk_norm:
        q_weight = weights.load(f"{attention}.q_norm.weight")
        k_weight = weights.load(f"{attention}.k_norm.weight")
        qk_norm = QkNorm(q_weight, k_weight, spec.rms_eps)
    return _Layer(
        qkv=linear([f"{attention}.{part}_proj" for part in "qkv"], spec.qkv_bias),
        output=linear([f"{attention}.o_proj"], spec.o_bias),
        gate_up=linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], spec.mlp_bias),
        down=linear([f"{mlp}.down_proj"], spec.mlp_bias),
        post_norm=weights.load(f"{prefix}.post_attention_layernorm.weight"),
        next_norm=weights.load(next_norm),
        qk_norm=qk_norm,
    )
