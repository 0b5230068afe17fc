"""The tensors of a model: their names, their shapes, and where a checkpoint stores them.

The model asks for tensors by one set of names, those of Llama checkpoints. Some families store
several of them as one tensor; `stored_as` says which part of which.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moonpool.engine.families import FAMILIES
from moonpool.engine.spec import ModelSpec

Shape = tuple[int, ...]


class NormNames(NamedTuple):
    """The norms of a layer, by their place; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_FIRST, _SECOND = "input_layernorm", "post_attention_layernorm"
NORMS = {
    "pre": NormNames(_FIRST, None, _SECOND, None),
    "post": NormNames(None, _SECOND, None, "post_feedforward_layernorm"),
    "both": NormNames(_FIRST, _SECOND, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


class StoredTensor(NamedTuple):
    """Where a checkpoint has a tensor: rows `first` .. `end` - 1 of tensor `name`, or all of it."""

    name: str
    first: int = 0
    end: int | None = None

    def take(self, stored: Tensor) -> Tensor:
        """A view of the stored tensor."""
        return stored if self.end is None else stored[self.first : self.end]


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """All tensors of a model by name, in the order of use; weights are [out, in]."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q, spec.o_bias),
        "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
        "mlp.up_proj": (inter, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inter, spec.mlp_bias),
    }
    norms = NORMS[spec.norms]
    shapes: dict[str, Shape] = {}
    if norms.before_attention:
        shapes[f"{norms.before_attention}.weight"] = (hidden,)
    for name, (out_features, in_features, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if spec.qk_norm:
        widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q, kv)
        shapes["self_attn.q_norm.weight"] = (widths[0],)
        shapes["self_attn.k_norm.weight"] = (widths[1],)
    for norm in norms[1:]:
        if norm:
            shapes[f"{norm}.weight"] = (hidden,)
    return shapes


def stored_as(spec: ModelSpec, name: str) -> StoredTensor:
    """Where a checkpoint of the model's family has the tensor `name`."""
    if not FAMILIES[spec.family].fused or not name.startswith("model.layers."):
        return StoredTensor(name)
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inter = spec.intermediate_size
    parts = {
        "q_proj": ("qkv_proj", 0, q),
        "k_proj": ("qkv_proj", q, q + kv),
        "v_proj": ("qkv_proj", q + kv, q + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, inter),
        "up_proj": ("gate_up_proj", inter, 2 * inter),
    }
    if module not in parts:
        return StoredTensor(name)
    fused, first, end = parts[module]
    return StoredTensor(f"{prefix}.{fused}.weight", first, end)


def stored_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """All tensors that a checkpoint must have, by the names it stores them under."""
    shapes: dict[str, Shape] = {}
    for name, shape in tensor_shapes(spec).items():
        stored = stored_as(spec, name)
        rows = shape[0] if stored.end is None else max(stored.end, shapes.get(stored.name, (0,))[0])
        shapes[stored.name] = (rows, *shape[1:])
    return shapes
