"""Names and shapes of a model's tensors, and where a checkpoint stores them.

The model asks for tensors by one set of names, those of Llama checkpoints. Some families store
several of these as one tensor; `stored_tensors` tells which part holds which.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.families.stored import Shape, StoredTensor, rows, whole
from moonpool_engine.engine.families.stored_delta import stored_delta
from moonpool_engine.engine.spec import DeltaSpec, LatentSpec, ModelSpec


class NormNames(NamedTuple):
    """The names of a layer's norms, by place; None if the layer lacks the norm."""

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


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Returns all tensors of a model by name, in the order of use; weights are [out, in]."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec, layer).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


class _Linear(NamedTuple):
    out_features: int
    in_features: int
    has_bias: bool

    def shapes(self, name: str) -> dict[str, Shape]:
        weight = {f"{name}.weight": (self.out_features, self.in_features)}
        return weight | ({f"{name}.bias": (self.out_features,)} if self.has_bias else {})


def _mlp_shapes(hidden: int, inter: int, has_bias: bool, prefix: str) -> dict[str, Shape]:
    return {
        **_Linear(inter, hidden, has_bias).shapes(f"{prefix}.gate_proj"),
        **_Linear(inter, hidden, has_bias).shapes(f"{prefix}.up_proj"),
        **_Linear(hidden, inter, has_bias).shapes(f"{prefix}.down_proj"),
    }


def _feed_forward_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    experts, hidden = spec.experts, spec.hidden_size
    if experts is None or layer in experts.dense_layers:
        return _mlp_shapes(hidden, spec.intermediate_size, spec.mlp_bias, "mlp")
    shapes = _Linear(experts.count, hidden, experts.biases).shapes("mlp.router")
    if experts.correction:
        shapes["mlp.router.correction"] = (experts.count,)
    for expert in range(experts.count):
        prefix = f"mlp.experts.{expert}"
        shapes |= _mlp_shapes(hidden, experts.intermediate_size, experts.biases, prefix)
    if experts.shared_size:
        shapes |= _mlp_shapes(hidden, experts.shared_size, False, "mlp.shared_experts")
    if experts.shared_gate:
        shapes["mlp.shared_gate.weight"] = (1, hidden)
    return shapes


def _delta_shapes(spec: ModelSpec, delta: DeltaSpec) -> dict[str, Shape]:
    prefix, hidden, heads = "linear_attn.", spec.hidden_size, delta.value_heads
    widths = {"qkv": delta.channels, "z": delta.values, "b": heads, "a": heads}
    shapes: dict[str, Shape] = {
        f"{prefix}in_proj_{part}.weight": (width, hidden) for part, width in widths.items()
    }
    shapes[f"{prefix}conv1d.weight"] = (delta.channels, delta.taps)
    shapes[f"{prefix}A_log"] = shapes[f"{prefix}dt_bias"] = (heads,)
    shapes[f"{prefix}norm.weight"] = (delta.value_dim,)
    shapes[f"{prefix}out_proj.weight"] = (hidden, delta.values)
    return shapes


def _latent_shapes(spec: ModelSpec, latent: LatentSpec) -> dict[str, Shape]:
    hidden, heads = spec.hidden_size, spec.num_heads
    queries, prefix = heads * (latent.nope_dim + latent.rope_dim), "self_attn."
    if latent.query_rank:
        shapes = _Linear(latent.query_rank, hidden, spec.qkv_bias).shapes(f"{prefix}q_a_proj")
        shapes[f"{prefix}q_a_layernorm.weight"] = (latent.query_rank,)
        shapes[f"{prefix}q_b_proj.weight"] = (queries, latent.query_rank)
    else:
        shapes = {f"{prefix}q_proj.weight": (queries, hidden)}
    down = _Linear(latent.rank + latent.rope_dim, hidden, spec.qkv_bias)
    shapes |= down.shapes(f"{prefix}kv_a_proj_with_mqa")
    shapes[f"{prefix}kv_a_layernorm.weight"] = (latent.rank,)
    up = heads * (latent.nope_dim + latent.value_dim)
    shapes[f"{prefix}kv_b_proj.weight"] = (up, latent.rank)
    return shapes | _Linear(hidden, heads * latent.value_dim, spec.o_bias).shapes(f"{prefix}o_proj")


def _layer_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    hidden = spec.hidden_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norms = NORMS[spec.norms]
    shapes: dict[str, Shape] = {}
    if norms.before_attention:
        shapes[f"{norms.before_attention}.weight"] = (hidden,)
    if spec.delta is not None and layer in spec.delta_layers:
        shapes |= _delta_shapes(spec, spec.delta)
    elif spec.latent is not None:
        shapes |= _latent_shapes(spec, spec.latent)
    else:
        for part, width in (("q", q), ("k", kv), ("v", kv)):
            shapes |= _Linear(width, hidden, spec.qkv_bias).shapes(f"self_attn.{part}_proj")
        if spec.gated_heads:
            shapes["self_attn.g_proj.weight"] = (q, hidden)
        shapes |= _Linear(hidden, q, spec.o_bias).shapes("self_attn.o_proj")
    shapes |= _feed_forward_shapes(spec, layer)
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    if spec.qk_norm and layer not in spec.delta_layers:
        widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q, kv)
        shapes["self_attn.q_norm.weight"] = (widths[0],)
        shapes["self_attn.k_norm.weight"] = (widths[1],)
    for norm in norms[1:]:
        if norm:
            shapes[f"{norm}.weight"] = (hidden,)
    return shapes


def stored_tensors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """Returns where a checkpoint of the model's family has each of the model's tensors."""
    family = FAMILIES[spec.family]
    found: dict[str, StoredTensor] = {}
    for name, shape in tensor_shapes(spec).items():
        place = StoredTensor(name, shape, whole)
        if family.fused in ("qkv", "gate_up") and ".layers." in name:
            place = _fused(spec, name, family.fused) or place
        if family.fused == "shared" and ".mlp." in name:
            place = _shared_mlp(spec, name)
        if family.experts is not None and ".mlp." in name:
            stored = family.experts.stored
            joined = spec.joined_experts and stored == "modules"
            place = _expert(spec, name, shape, "joined" if joined else stored)
        if family.delta:
            place = stored_delta(spec, place, family.delta == "joined")
        if family.neighbours and name.split(".")[-2] in ("q_proj", "k_proj"):
            place = place._replace(take=partial(_halves_first, spec))
        for ours, theirs in family.stored_names:
            if name.endswith(f".{ours}.weight"):
                place = place._replace(name=name.replace(f".{ours}.", f".{theirs}."))
        found[name] = place._replace(name=_prefixed(place.name, spec.prefix))
    return found


def _halves_first(spec: ModelSpec, stored: Tensor) -> Tensor:
    """Reorders q or k of a family whose RoPE rotates neighbours, to the order for RoPE that rotates
    halves. Scores stay equal, because they are sums over a head's elements."""
    rotated = spec.rope.rotary_dim or spec.head_dim
    heads = stored.unflatten(0, (-1, spec.head_dim))
    pairs = heads[:, :rotated].unflatten(1, (-1, 2))
    both = (pairs[:, :, 0], pairs[:, :, 1], heads[:, rotated:])
    return torch.cat(both, dim=1).flatten(0, 1)


def _prefixed(name: str, prefix: str) -> str:
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return f"language_model.{name}" if prefix == "language_model.model." else name


def stored_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Returns all tensors that a checkpoint must have, by their stored names."""
    return {place.name: place.shape for place in stored_tensors(spec).values()}


def _fused(spec: ModelSpec, name: str, fused: str) -> StoredTensor | None:
    """Returns the part of `gate_up_proj`, or of Phi's `qkv_proj`, or None for other tensors."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inter = spec.intermediate_size
    qkv, gate_up = ("qkv_proj", q + 2 * kv), ("gate_up_proj", 2 * inter)
    parts = {
        "q_proj": (*qkv, 0, q),
        "k_proj": (*qkv, q, q + kv),
        "v_proj": (*qkv, q + kv, q + 2 * kv),
        "gate_proj": (*gate_up, 0, inter),
        "up_proj": (*gate_up, inter, 2 * inter),
    }
    if module not in parts or (fused == "gate_up" and not name.endswith(_GATE_UP)):
        return None
    fused, size, first, end = parts[module]
    shape = (size, spec.hidden_size)
    return StoredTensor(f"{prefix}.{fused}.weight", shape, partial(rows, first, end))


def _shared_mlp(spec: ModelSpec, name: str) -> StoredTensor:
    """Granite 4: the MLP of a model without experts is stored as the shared MLP of the other
    models."""
    layer, _, rest = name.partition(".mlp.")
    inter, hidden = spec.intermediate_size, spec.hidden_size
    if rest.startswith("down_proj"):
        return StoredTensor(f"{layer}.shared_mlp.output_linear.weight", (hidden, inter), whole)
    first = 0 if rest.startswith("gate_proj") else inter
    take = partial(rows, first, first + inter)
    return StoredTensor(f"{layer}.shared_mlp.input_linear.weight", (2 * inter, hidden), take)


_GATE_UP = ("gate_proj.weight", "up_proj.weight")
_W123 = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _expert(spec: ModelSpec, name: str, shape: Shape, stored: str) -> StoredTensor:
    """A tensor of a mixture: of its router, an expert, the shared experts, or a dense layer."""
    layer, _, rest = name.partition(".mlp.")
    words = rest.split(".")  # such as router.weight, or experts.3.gate_proj.weight
    if stored == "stacked" and words[0] == "experts":
        return _stacked(spec, f"{layer}.mlp.experts", *words[1:])
    if stored == "halves":
        return _halves(spec, f"{layer}.block_sparse_moe", shape, words)
    if stored == "joined" and words[0] == "experts":
        return _joined(spec, f"{layer}.mlp.experts", int(words[1]), words[2])
    if words[0] in ("shared_experts", "shared_gate") and spec.experts and spec.experts.shared_gate:
        theirs = words[0].replace("experts", "expert").replace("gate", "expert_gate")
        return StoredTensor(f"{layer}.mlp.{theirs}.{'.'.join(words[1:])}", shape, whole)
    if name.endswith(".router.correction"):
        return _correction(spec, f"{layer}.mlp", shape)
    if words[0] == "router" and stored != "stacked":
        mlp = "block_sparse_moe" if stored == "w123" else "mlp"
        return StoredTensor(f"{layer}.{mlp}.gate.{words[1]}", shape, whole)
    if stored == "w123" and words[0] == "experts":
        name = f"{layer}.block_sparse_moe.experts.{words[1]}.{_W123[words[2]]}.weight"
    return StoredTensor(name, shape, whole)


def _correction(spec: ModelSpec, mlp: str, shape: Shape) -> StoredTensor:
    experts = FAMILIES[spec.family].experts
    assert experts is not None
    stored = f"{mlp}.{experts.correction}"
    if experts.correction.startswith("gate."):
        return StoredTensor(stored, shape, whole)
    return StoredTensor(stored, (1, *shape), lambda correction: correction[0])  # ERNIE 4.5


def _stacked(spec: ModelSpec, prefix: str, expert: str, module: str, kind: str) -> StoredTensor:
    """gpt-oss: all experts are in one tensor, [in, out] each, gate and up interleaved."""
    assert spec.experts is not None
    inter, hidden, count = spec.experts.intermediate_size, spec.hidden_size, spec.experts.count
    own = int(expert)
    suffix = "_bias" if kind == "bias" else ""
    if module == "down_proj":
        sizes = (hidden,) if suffix else (inter, hidden)
        return StoredTensor(f"{prefix}.down_proj{suffix}", (count, *sizes), lambda t: t[own].t())
    turn = 0 if module == "gate_proj" else 1
    sizes = (2 * inter,) if suffix else (hidden, 2 * inter)
    name = f"{prefix}.gate_up_proj{suffix}"
    return StoredTensor(name, (count, *sizes), lambda t: t[own][..., turn::2].t())


def _halves(spec: ModelSpec, prefix: str, shape: Shape, words: list[str]) -> StoredTensor:
    """Granite's mixtures: all experts in one tensor, [out, in] each, gate before up."""
    assert spec.experts is not None
    if words[0] == "router":
        return StoredTensor(f"{prefix}.router.layer.weight", shape, whole)
    return _joined(
        spec, prefix, int(words[1]), words[2], ("input_linear.weight", "output_linear.weight")
    )


def _joined(
    spec: ModelSpec,
    prefix: str,
    own: int,
    module: str,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> StoredTensor:
    """All experts are in one tensor, [out, in] each, gate before up. `names`: the names of the two
    tensors."""
    assert spec.experts is not None
    inter, hidden, count = spec.experts.intermediate_size, spec.hidden_size, spec.experts.count
    if module == "down_proj":
        return StoredTensor(
            f"{prefix}.{names[1]}", (count, hidden, inter), lambda stored: stored[own]
        )
    first = 0 if module == "gate_proj" else inter
    return StoredTensor(
        f"{prefix}.{names[0]}",
        (count, 2 * inter, hidden),
        lambda stored: stored[own, first : first + inter],
    )
