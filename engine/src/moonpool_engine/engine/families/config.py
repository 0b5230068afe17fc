"""Reads a checkpoint's `config.json` into a `ModelSpec`, by the description of its family.

Reads both spellings of RoPE scaling (`rope_scaling` and `rope_parameters`), and refuses every
option that the engine would compute wrongly. This module reads no weights.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown, shown_name
from moonpool_engine.engine.families.delta import delta_layers, read_delta
from moonpool_engine.engine.families.experts import read_experts
from moonpool_engine.engine.families.family import Family
from moonpool_engine.engine.families.latent import latent_scale, read_latent
from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.families.rope import full_rope, local_rope
from moonpool_engine.engine.spec import ModelSpec

HEAD_DIM_MULTIPLE = 16
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "clamped": ("silu", "swish"),  # a SiLU with swiglu_limit and swiglu_alpha
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}
ALL_HEADS = ("llama", "phi3", "granite", "granitemoe", "granitemoehybrid", "olmoe")
"""Families whose older configs leave out the number of KV heads."""
_LONGEST_NAME = 80
_ENDING = re.compile(r"(ForCausalLM|ForConditionalGeneration|_text)$")


def parse_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """ModelSpec of a parsed `config.json`, which errors call `where`. Raises `ModelError`."""
    whole = Fields(config, where)
    name = _family(whole)
    family = FAMILIES[name]
    fields = _text_config(whole, family)
    _refuse_unsupported(fields, family)
    hidden_size = fields.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(fields, name, hidden_size)
    num_layers = fields.positive("num_hidden_layers")
    max_positions = fields.positive("max_position_embeddings")
    windows = _windows(fields, family, num_layers, max_positions)
    latent = read_latent(fields) if family.latent else None
    rotated = head_dim if latent is None else latent.rope_dim
    rope, limit, notes = full_rope(fields, family, rotated, max_positions)
    factors = _factors(fields, family, hidden_size)
    if latent is not None:
        rope = replace(rope, rotary_dim=latent.rope_dim)
        factors["score_scale"] = latent_scale(latent, rope)
    # gpt-oss, which has sinks, has biases unless its config denies them.
    asks_bias = family.biases == "option" and fields.flag("attention_bias", family.sinks)
    o_bias = asks_bias
    if family.o_bias_key != "attention_bias":
        o_bias = bool(family.o_bias_key) and fields.flag(family.o_bias_key)
    return ModelSpec(
        family=name,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.positive(
            "shared_intermediate_size" if family.fused == "shared" else "intermediate_size"
        ),
        max_positions=limit,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", family.root_embedding),
        qkv_bias=family.biases == "qkv" or asks_bias,
        o_bias=o_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=_qk_norm(fields, family),
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        sinks=family.sinks,
        experts=None
        if family.experts is None
        else read_experts(fields, family.experts, num_layers),
        windows=windows,
        local_rope=local_rope(fields, family) if any(windows) else None,
        no_rope=_no_rope(fields, family, num_layers),
        eos_token_ids=fields.token_ids("eos_token_id"),
        notes=notes,
        latent=latent,
        delta=read_delta(fields) if family.delta else None,
        delta_layers=delta_layers(fields, num_layers) if family.delta else (),
        gated_heads=bool(family.delta),
        further_layers=fields.count("num_nextn_predict_layers", 0),
        **factors,  # type: ignore[arg-type]
    )


def _family(fields: Fields) -> str:
    architectures = fields.texts("architectures") or []
    served = {family.architecture: name for name, family in FAMILIES.items()}
    served |= {inside: name for name, family in FAMILIES.items() for inside in family.inside}
    for architecture in architectures:
        if architecture in served:
            return served[architecture]
    model_type = fields.text("model_type")
    if not architectures and model_type in FAMILIES:
        return model_type
    if not architectures and not model_type:
        raise ModelError(
            f"{fields.where} has neither 'architectures' nor 'model_type', so it describes no"
            " model: give the folder of a checkpoint in the layout of transformers"
        )
    named = ", ".join(architectures) or f"model_type {model_type}"
    wanted = _ENDING.sub("", (architectures or [model_type])[0][:_LONGEST_NAME]).lower()
    short = {_ENDING.sub("", name).lower(): name for name in served}
    nearest = difflib.get_close_matches(wanted, short, n=1, cutoff=0.0)[0]
    raise ModelError(
        f"unknown architecture {shown_name(named)}; the nearest that is served is"
        f" {short[nearest]}; served: {', '.join(served)}"
    )


def _text_config(fields: Fields, family: Family) -> Fields:
    """Returns the text part of a config of text and images, with the values that the family's
    configs leave out."""
    inner, defaults = fields.within("text_config"), fields.made(dict(family.defaults))
    if family.inside and inner.names:
        outer = fields.picked(
            "bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings"
        )
        return inner.made({}).over(outer).over(inner).over(defaults)
    return fields.renamed(dict(family.aliases)).over(fields).over(defaults)


def _heads(fields: Fields, name: str, hidden_size: int) -> tuple[int, int, int]:
    """Returns the numbers of heads and KV heads and the elements per head, as the blocks have
    them."""
    num_heads = fields.positive("num_attention_heads")
    if FAMILIES[name].latent:
        latent = read_latent(fields)
        return num_heads, 1, latent.rank + latent.rope_dim
    all_heads = num_heads if name in ALL_HEADS else None
    num_kv_heads = fields.positive("num_key_value_heads", default=all_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads, _head_dim(fields, hidden_size // num_heads)


def _qk_norm(fields: Fields, family: Family) -> str:
    asked = not family.qk_norm_key or fields.flag(family.qk_norm_key)
    return family.qk_norm if asked else ""


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    quantization = fields.within("quantization_config")
    if quantization.names:
        method = quantization.text("quant_method", "unknown")
        raise ModelError(
            f"the checkpoint is quantised ({shown_name(method)}); use the original float32,"
            " bfloat16 or float16 checkpoint"
        )
    names = ACTIVATIONS[family.activation]
    # A Gemma's `hidden_act` is an older and wrong spelling of its activation.
    key = "hidden_activation" if family.root_embedding else "hidden_act"
    activation = fields.text(key) or names[0]
    if activation not in names:
        raise fields.error(f"{key} is {shown(activation)}; only {names[0]!r} is supported")
    partial = fields.number("partial_rotary_factor", 1.0)
    if fields.has("rope_parameters"):
        partial = fields.within("rope_parameters").number("partial_rotary_factor", partial)
    if partial != 1 and not family.partial_rope:
        raise fields.error(f"partial_rotary_factor is {partial}; only 1.0 is supported")
    if family.attention_only:
        _refuse_hybrid(fields)
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv is not null; clipped q, k and v are not supported")
    if fields.flag("use_bidirectional_attention"):
        raise fields.error(
            "use_bidirectional_attention is true; only causal attention is supported"
        )


def _refuse_hybrid(fields: Fields) -> None:
    kinds = fields.texts("layer_types")
    if kinds is None or set(kinds) - {"attention", "full_attention"}:
        raise fields.error(
            "layer_types has layers of state spaces (mamba); only models of attention"
            " layers are supported"
        )
    if fields.count("num_local_experts", 0):
        raise fields.error("num_local_experts is not 0; its experts are not supported")


def _factors(fields: Fields, family: Family, hidden_size: int) -> dict[str, float]:
    """The factors and caps of embedding, residual, scores and logits."""
    found: dict[str, float] = {}
    if family.root_embedding:
        found["embedding_scale"] = hidden_size**0.5
    if family.activation == "clamped":
        found["gate_alpha"] = fields.number("swiglu_alpha", 1.702)
        found["gate_limit"] = fields.number("swiglu_limit", 7.0)
    if family.multipliers:
        found["embedding_scale"] = fields.number("embedding_multiplier", 1.0)
        found["residual_scale"] = fields.number("residual_multiplier", 1.0)
        found["logit_divisor"] = fields.number("logits_scaling", 1.0)
    if family.scale_key:
        default = 256.0 if family.root_embedding else 1.0
        found["score_scale"] = fields.number(family.scale_key, default) ** family.scale_power
    if family.soft_caps:
        for field, key in (
            ("score_cap", "attn_logit_softcapping"),
            ("logit_cap", "final_logit_softcapping"),
        ):
            if fields.has(key):
                found[field] = fields.number(key)
    return found


def _windows(
    fields: Fields, family: Family, num_layers: int, max_positions: int
) -> tuple[int, ...]:
    """The window of each layer, 0 where there is none; () if no layer has one in this context."""
    slides = family.window == "option" and fields.flag("use_sliding_window")
    window = _window(fields, family) if slides or family.window == "always" else None
    if window is None or window >= max_positions:
        return ()
    windows = [window if kind else 0 for kind in _sliding(fields, family, num_layers)]
    return tuple(windows) if any(windows) else ()


def _window(fields: Fields, family: Family) -> int | None:
    """Returns the window length in tokens, or None if no layer has a window."""
    if "sliding_window" not in fields:
        return family.window_default
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def _sliding(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    """Which layers have the window."""
    types = fields.texts("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise fields.error(f"layer_types names no kind for each of {num_layers}")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise fields.error(f"layers of type {shown(unknown.pop())} are not supported")
        return [kind == "sliding_attention" for kind in types]
    if family.rope_skips == "listed":
        without = _no_rope(fields, family, num_layers)
        return [layer in without for layer in range(num_layers)]
    if family.window == "option":
        first = fields.count("max_window_layers", 28)
        return [layer >= first for layer in range(num_layers)]
    if fields.is_text("sliding_window_pattern"):  # a pattern such as LLLG, which is repeated
        pattern = fields.text("sliding_window_pattern")
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error(f"sliding_window_pattern {shown(pattern)} has not only L and G")
        kinds = [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
        return [*kinds[:-1], False]  # the last layer sees the whole context
    every = fields.count("sliding_window_pattern", family.full_every) or family.full_every
    return [not every or (layer + 1) % every > 0 for layer in range(num_layers)]


def _no_rope(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.attention_only and fields.text("position_embedding_type", "rope") != "rope":
        return tuple(range(num_layers))
    if not family.rope_skips:
        return ()
    if family.rope_skips == "full":
        if _window(fields, family) is None:
            return ()
        slides = _sliding(fields, family, num_layers)
        return tuple(layer for layer, does in enumerate(slides) if not does)
    interval = fields.positive("no_rope_layer_interval", default=4)
    rotated = fields.whole_numbers("no_rope_layers")
    if rotated is None:
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    return tuple(layer for layer, does in enumerate(rotated[:num_layers]) if not does)


def _head_dim(fields: Fields, default: int) -> int:
    head_dim = fields.positive("head_dim", default=default)
    if head_dim % HEAD_DIM_MULTIPLE:
        raise fields.error(
            f"head_dim {head_dim}; only multiples of {HEAD_DIM_MULTIPLE} are supported"
        )
    return head_dim
