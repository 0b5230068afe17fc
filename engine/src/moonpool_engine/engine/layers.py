"""Packs the parts of one layer, as its `ModelSpec` describes them. No part knows a family."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moonpool_engine.engine.attention import HeadsAttention, LatentAttention
from moonpool_engine.engine.delta.attention import DeltaAttention
from moonpool_engine.engine.mlp import ExpertsMlp, GatedMlp
from moonpool_engine.engine.ops import AttendRule, Ops, RopeTable
from moonpool_engine.engine.packing import PlacedWeights, Weights, norm_weight
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.tensors import NORMS

Attention = HeadsAttention | LatentAttention | DeltaAttention
Mlp = GatedMlp | ExpertsMlp


@dataclass(frozen=True, slots=True)
class Layer:
    """The packed weights of one layer. Norm weights are [hidden] float32, or None if the layer has
    no such norm."""

    attention: Attention
    mlp: Mlp
    rope: RopeTable
    rule: AttendRule
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None
    next_norm: Tensor | None  # the norm before the next layer's attention, or the final norm


def attend_rule(spec: ModelSpec, weights: Weights, layer: int) -> AttendRule:
    """Returns how a layer's attention differs from plain causal attention."""
    name = f"model.layers.{layer}.self_attn.sinks"
    sinks = weights.load(name).float() if spec.sinks else None
    return AttendRule(spec.window_of(layer), spec.score_cap, sinks)


def attend_rules(spec: ModelSpec, weights: Weights) -> tuple[AttendRule, ...]:
    """The rule of each layer; () if all layers attend plainly."""
    if not (any(spec.windows) or spec.score_cap or spec.sinks):
        return ()
    return tuple(attend_rule(spec, weights, layer) for layer in range(spec.num_layers))


def pack_layer(
    spec: ModelSpec, weights: PlacedWeights, ops: Ops, layer: int, rope: RopeTable
) -> Layer:
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
        attention=_pack_attention(spec, weights, ops, layer),
        mlp=_pack_mlp(spec, weights, ops, layer),
        rope=rope,
        rule=attend_rule(spec, weights, layer),
        after_attention=norm(names.after_attention),
        before_mlp=norm(names.before_mlp),
        after_mlp=norm(names.after_mlp),
        next_norm=next_norm,
    )


def _pack_attention(spec: ModelSpec, weights: PlacedWeights, ops: Ops, layer: int) -> Attention:
    prefix = f"model.layers.{layer}"
    if layer in spec.delta_layers:
        return DeltaAttention(spec, weights, ops, f"{prefix}.linear_attn")
    attention = HeadsAttention if spec.latent is None else LatentAttention
    return attention(spec, weights, ops, f"{prefix}.self_attn")


def _pack_mlp(spec: ModelSpec, weights: PlacedWeights, ops: Ops, layer: int) -> Mlp:
    prefix = f"model.layers.{layer}.mlp"
    if spec.experts is not None and layer not in spec.experts.dense_layers:
        return ExpertsMlp(spec, weights, ops, prefix)
    return GatedMlp(spec, weights, ops, prefix, spec.mlp_bias)
