"""The decoder model of all families: each layer is two dense halves around an attention call.

The model owns the packed weights and the order of operations. Chunked prefill, layer-wise streaming
and attention offloading all divide a layer at the same points: `qkv`, attend, `output`. The model
uses only the `Ops` protocol. The model neither allocates blocks nor samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.layers import pack_layer
from moonpool_engine.engine.load_progress import reported
from moonpool_engine.engine.lora.adapter import Adapter
from moonpool_engine.engine.lora.linear import LoraPacker
from moonpool_engine.engine.ops import (
    AttendArgs,
    HeadShape,
    KvCache,
    Linear,
    Ops,
    RopeTable,
    StepMeta,
)
from moonpool_engine.engine.packing import PlacedWeights, Weights, norm_weight
from moonpool_engine.engine.quantized.matrix import Matrix, lookup
from moonpool_engine.engine.rope import no_rope, rope_table
from moonpool_engine.engine.spec import ModelSpec, RopeSpec
from moonpool_engine.engine.step import BeforeAttend, LayerDone
from moonpool_engine.engine.tensors import NORMS


def head_shape(spec: ModelSpec) -> HeadShape:
    """The heads of a model's attention."""
    latent_dim = 0 if spec.latent is None else spec.latent.rank
    return HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, latent_dim)


class Ropes:
    """The rotary tables of a model's layers, each made once."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._made: dict[RopeSpec | None, RopeTable] = {}

    def of(self, layer: int) -> RopeTable:
        """Returns the table of one layer."""
        spec = self._spec
        rope: RopeSpec | None = spec.rope
        if layer in spec.no_rope:
            rope = None
        elif spec.local_rope is not None and spec.window_of(layer):
            rope = spec.local_rope
        if rope not in self._made:
            limit = spec.max_positions
            table = no_rope(limit) if rope is None else rope_table(rope, spec.head_dim, limit)
            self._made[rope] = RopeTable(table.cos.to(self._device), table.sin.to(self._device))
        return self._made[rope]


class DecoderModel:
    """Weights packed by `ops`, and the forward pass of a step's T rows.

    Between layers a step carries two tensors [T, hidden]: the residual stream, updated in place,
    and its normed copy, the input of the next `qkv`.

    A pipeline stage has only some of the `layers`: the first stage embeds, the last one computes
    logits. In a part of a model, a row gets the same bits as in the whole model. Without `edges`
    the model neither embeds nor computes logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        layers: range | None = None,
        edges: bool = True,
        ropes: Ropes | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`ropes`: the tables, if another part of the model in this process has made them.
        `adapters`: the adapters, which `StepMeta.adapters` numbers from 1 on. Raises ModelError if
        `ops` do not compute what the model has."""
        self.spec = spec
        self.layers = range(spec.num_layers) if layers is None else layers
        assert self.layers and self.layers.start >= 0 and self.layers.stop <= spec.num_layers
        missing = [extra for extra in spec.extras() if extra in ops.without]
        if missing:
            raise ModelError(
                f"the model has {' and '.join(missing)}, which this device or attention worker "
                "does not compute: use --device cpu, without --attention"
            )
        self.heads = head_shape(spec)
        self._ops = ops
        self._scale = spec.scale()
        self.ropes = Ropes(spec, ops.device) if ropes is None else ropes
        lora = LoraPacker(adapters, ops)
        self.adapter_rows = lora.rows
        placed = PlacedWeights(weights, ops.device, lora)
        self._first_norm: Tensor | None = None
        self._embedding: Matrix | None = None
        self._head: Linear | None = None
        first_norm = NORMS[spec.norms].before_attention
        if self.begins and first_norm is not None:
            self._first_norm = norm_weight(spec, placed, f"model.layers.0.{first_norm}.weight")
        self._layers = {
            i: pack_layer(spec, placed, ops, i, self.ropes.of(i)) for i in reported(self.layers)
        }
        if edges and (self.begins or (self.ends and spec.tie_embeddings)):
            self._embedding = placed.matrix("model.embed_tokens.weight")
        if edges and self.ends:
            tied = self._embedding if spec.tie_embeddings else None
            self._head = ops.linear(placed.matrix("lm_head.weight") if tied is None else tied, None)
        if not self.begins:
            self._embedding = None  # the embedding is needed only to pack the tied LM head

    @property
    def begins(self) -> bool:
        """Whether it has the model's first layer."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether it has the model's last layer."""
        return self.layers.stop == self.spec.num_layers

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [T] int64 -> residual and normed, each [T, hidden]. Only the first stage calls
        this."""
        assert self._embedding is not None
        residual = lookup(self._embedding, token_ids)
        if self.spec.embedding_scale != 1:
            residual *= residual.new_tensor(self.spec.embedding_scale)
        return residual, self.enter(residual)

    def enter(self, residual: Tensor) -> Tensor:
        """Norms the embedded rows: residual [T, hidden] -> the first layer's input, same shape."""
        return self._normed(residual, self._first_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.spec.rms_eps)

    def _add(
        self, added: Tensor, after: Tensor | None, residual: Tensor, before: Tensor | None
    ) -> Tensor:
        """Norms the input with `after`, adds it in place, and returns the residual normed with
        `before`."""
        added = self._normed(added, after)
        if self.spec.residual_scale != 1:
            added = added * self.spec.residual_scale
        if before is None:
            return residual.add_(added)
        return self._ops.add_rms_norm(added, residual, before, self.spec.rms_eps)

    def qkv(self, layer: int, normed: Tensor) -> Tensor:
        """The first dense half: normed [T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]."""
        return self._layers[layer].attention.qkv(normed)

    def store(self, layer: int, qkv: Tensor, cache: KvCache, meta: StepMeta) -> Tensor:
        """Writes the values that later rows need into the blocks of these rows, and returns the
        input of `attend`.

        Stores K and V. qkv: [T, (heads + 2 * kv_heads) * head_dim] -> q [T, heads, head_dim], in
        the form that the layer's attention uses: with gates, or without K and V.
        """
        own = self._layers[layer]
        args = AttendArgs(self.heads, cache, layer, meta, self._scale, own.rule)
        return own.attention.store(qkv, own.rope, args)

    def attend(self, layer: int, q: Tensor, cache: KvCache, meta: StepMeta) -> Tensor:
        """Takes what `store` returned, such as q [T, heads, head_dim], and returns [T, heads *
        head_dim]."""
        own = self._layers[layer]
        args = AttendArgs(self.heads, cache, layer, meta, self._scale, own.rule)
        return own.attention.attend(q, args)

    def output(self, layer: int, attention: Tensor, residual: Tensor) -> Tensor:
        """The second dense half; updates `residual` in place.

        Takes attention [T, heads * head_dim] and residual [T, hidden]; returns the next normed
        input [T, hidden].
        """
        normed = self.add_attention(layer, self.project(layer, attention), residual)
        return self.add_mlp(layer, self.mlp(layer, normed), residual)

    # The second half in four parts, between which shards are summed

    def project(self, layer: int, attention: Tensor) -> Tensor:
        """The output projection: [T, heads * head_dim] -> [T, hidden], to add to the residual."""
        return self._layers[layer].attention.project(attention)

    def add_attention(self, layer: int, added: Tensor, residual: Tensor) -> Tensor:
        """Adds the projected attention to `residual` in place; returns the MLP's input.

        The shape of all tensors is [T, hidden].
        """
        own = self._layers[layer]
        return self._add(added, own.after_attention, residual, own.before_mlp)

    def mlp(self, layer: int, normed: Tensor) -> Tensor:
        """Returns what the MLP adds to the residual."""
        return self._layers[layer].mlp(normed)

    def add_mlp(self, layer: int, added: Tensor, residual: Tensor) -> Tensor:
        """Adds what `mlp` returned to `residual` in place; returns the next layer's input."""
        own = self._layers[layer]
        return self._add(added, own.after_mlp, residual, own.next_norm)

    def logits(self, normed: Tensor) -> Tensor:
        """The last layer's output [rows, hidden] -> [rows, vocab] float32. Only the last stage
        calls this."""
        assert self._head is not None
        logits = self._head(normed).float()
        if self.spec.logit_divisor != 1:
            logits /= self.spec.logit_divisor
        if self.spec.logit_cap:
            logits = self._ops.soft_cap(logits, self.spec.logit_cap)
        return logits

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

        Takes token_ids [T] int64 and wanted [W] row numbers; returns [W, vocab] float32. After its
        KVCache is stored, the last layer computes only the wanted rows, because no other row is
        read.
        """
        normed = self.hidden(token_ids, cache, meta, wanted, on_layer, before_attend)
        return None if normed is None else self.logits(normed)

    def hidden(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """Computes as `forward` does, but returns the normed final hidden states: [W, hidden]."""
        start = self.embed(token_ids)
        done = self.advance(*start, cache, meta, wanted, on_layer, before_attend)
        return None if done is None else done[1]

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

        After the model's last layer only the `wanted` rows remain, [W, hidden]; returns None
        without wanted rows.
        """
        last = self.spec.num_layers - 1
        self.adapter_rows.begin(meta)
        for layer in self.layers:
            qkv = self.qkv(layer, normed)
            # such a layer continues from a state, which `store` reads
            continues = layer in self.spec.delta_layers
            if continues and before_attend is not None:
                before_attend(layer)
            q = self.store(layer, qkv, cache, meta)
            if on_layer is not None:
                on_layer(layer)
            if layer == last and wanted is None:
                return None
            if not continues and before_attend is not None:
                before_attend(layer)
            attention = self.attend(layer, q, cache, meta)
            if layer == last and wanted is not None and len(wanted) < meta.num_rows:
                attention, residual = attention[wanted], residual[wanted]
                self.adapter_rows.keep(wanted)
            normed = self.output(layer, attention, residual)
        return residual, normed
