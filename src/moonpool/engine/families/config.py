"""Reads a checkpoint's `config.json` into a `ModelSpec`, by the description of its family.

Reads both spellings of RoPE scaling (`rope_scaling` and `rope_parameters`), and refuses every
option that the engine would compute wrongly. It reads no weights.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.engine.families.delta import delta_layers, read_delta
from moonpool.engine.families.experts import read_experts
from moonpool.engine.families.family import Family
from moonpool.engine.families.latent import latent_scale, read_latent
from moonpool.engine.families.rope import full_rope, local_rope
from moonpool.engine.families.table import FAMILIES
from moonpool.engine.families.values import mapping, number, positive, whole_numbers
from moonpool.engine.spec import ModelError, ModelSpec

HEAD_DIM_MULTIPLE = 16
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "clamped": ("silu", "swish"),  # with swiglu_limit and swiglu_alpha
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}
ALL_HEADS = ("llama", "phi3", "granite", "granitemoe", "granitemoehybrid", "olmoe")
"""Families whose older configs leave out the number of KV heads."""
_ENDING = re.compile(r"(ForCausalLM|ForConditionalGeneration|_text)$")


def parse_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a parsed `config.json`. Raises `ModelError`."""
    name = _family(config)
    family = FAMILIES[name]
    config = _text_config(config, family)
    _refuse_unsupported(config, family)
    hidden_size = positive(config, "hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(config, name, hidden_size)
    num_layers = positive(config, "num_hidden_layers")
    max_positions = positive(config, "max_position_embeddings")
    windows = _windows(config, family, num_layers, max_positions)
    latent = read_latent(config) if family.latent else None
    rotated = head_dim if latent is None else latent.rope_dim
    rope, limit, notes = full_rope(config, family, rotated, max_positions)
    factors = _factors(config, family, hidden_size)
    if latent is not None:
        rope = replace(rope, rotary_dim=latent.rope_dim)
        factors["score_scale"] = latent_scale(latent, rope)
    # gpt-oss, which has sinks, has biases unless its config denies them.
    asks_bias = bool(config.get("attention_bias", family.sinks)) and family.biases == "option"
    o_bias = bool(config.get(family.o_bias_key, False))
    if family.o_bias_key == "attention_bias":
        o_bias = asks_bias
    return ModelSpec(
        family=name,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(
            config, "shared_intermediate_size" if family.fused == "shared" else "intermediate_size"
        ),
        max_positions=limit,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", family.root_embedding)),
        qkv_bias=family.biases == "qkv" or asks_bias,
        o_bias=o_bias,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=_qk_norm(config, family),
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        sinks=family.sinks,
        experts=None
        if family.experts is None
        else read_experts(config, family.experts, num_layers),
        windows=windows,
        local_rope=local_rope(config, family) if any(windows) else None,
        no_rope=_no_rope(config, family, num_layers),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos(config),
        notes=notes,
        latent=latent,
        delta=read_delta(config) if family.delta else None,
        delta_layers=delta_layers(config, num_layers) if family.delta else (),
        gated_heads=bool(family.delta),
        further_layers=config.get("num_nextn_predict_layers") or 0,
        **factors,  # type: ignore[arg-type]
    )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"config.json: architectures is {architectures!r}, not a list of names")
    served = {family.architecture: name for name, family in FAMILIES.items()}
    served |= {inside: name for name, family in FAMILIES.items() for inside in family.inside}
    for architecture in architectures:
        if architecture in served:
            return served[architecture]
    model_type = config.get("model_type")
    if not architectures and model_type in FAMILIES:
        return str(model_type)
    named = ", ".join(map(str, architectures)) or f"model_type {model_type!r}"
    wanted = _ENDING.sub("", str(architectures[0] if architectures else model_type)).lower()
    short = {_ENDING.sub("", name).lower(): name for name in served}
    nearest = difflib.get_close_matches(wanted, short, n=1, cutoff=0.0)[0]
    raise ModelError(
        f"unknown architecture {named}; the nearest that is served is {short[nearest]}; "
        f"served: {', '.join(served)}"
    )


def _text_config(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The text part of a config of text and images, with what the family's configs leave out."""
    inner = mapping(config, "text_config") if family.inside else {}
    if not inner:
        named = {ours: config[theirs] for ours, theirs in family.aliases if theirs in config}
        return {**dict(family.defaults), **config, **named}
    outer = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
    own = {key: config[key] for key in outer if config.get(key) is not None}
    return {**dict(family.defaults), **inner, **own}


def _heads(config: Mapping[str, Any], name: str, hidden_size: int) -> tuple[int, int, int]:
    """The heads, KV heads and elements per head, as the blocks have them."""
    num_heads = positive(config, "num_attention_heads")
    if FAMILIES[name].latent:
        latent = read_latent(config)
        return num_heads, 1, latent.rank + latent.rope_dim
    all_heads = num_heads if name in ALL_HEADS else None
    num_kv_heads = positive(config, "num_key_value_heads", default=all_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads, _head_dim(config, hidden_size // num_heads)


def _qk_norm(config: Mapping[str, Any], family: Family) -> str:
    asked = not family.qk_norm_key or bool(config.get(family.qk_norm_key, False))
    return family.qk_norm if asked else ""


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    if config.get("quantization_config"):
        method = mapping(config, "quantization_config").get("quant_method", "unknown")
        raise ModelError(
            f"the checkpoint is quantised ({method}); use the original float32, bfloat16 or "
            "float16 checkpoint"
        )
    names = ACTIVATIONS[family.activation]
    # A Gemma's `hidden_act` is an older and wrong spelling of its activation.
    key = "hidden_activation" if family.root_embedding else "hidden_act"
    activation = config.get(key) or names[0]
    if activation not in names:
        raise ModelError(f"config.json: {key} is {activation!r}; only {names[0]!r} is supported")
    rope = mapping(config, "rope_parameters")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0) and not family.partial_rope:
        raise ModelError(f"config.json: partial_rotary_factor is {partial}; only 1.0 is supported")
    if family.attention_only:
        _refuse_hybrid(config)
    if config.get("clip_qkv") is not None:
        raise ModelError("config.json: clip_qkv is not null; clipped q, k and v are not supported")
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            "config.json: use_bidirectional_attention is true; only causal attention is supported"
        )


def _refuse_hybrid(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"attention", "full_attention"}:
        raise ModelError(
            "config.json: layer_types has layers of state spaces (mamba); only models of attention"
            " layers are supported"
        )
    if config.get("num_local_experts"):
        raise ModelError("config.json: num_local_experts is not 0; its experts are not supported")


def _factors(config: Mapping[str, Any], family: Family, hidden_size: int) -> dict[str, float]:
    """The factors and caps of embedding, residual, scores and logits."""
    found: dict[str, float] = {}
    if family.root_embedding:
        found["embedding_scale"] = hidden_size**0.5
    if family.activation == "clamped":
        found["gate_alpha"] = number(config, "swiglu_alpha", 1.702)
        found["gate_limit"] = number(config, "swiglu_limit", 7.0)
    if family.multipliers:
        found["embedding_scale"] = number(config, "embedding_multiplier", 1.0)
        found["residual_scale"] = number(config, "residual_multiplier", 1.0)
        found["logit_divisor"] = number(config, "logits_scaling", 1.0)
    if family.scale_key:
        default = 256.0 if family.root_embedding else 1.0
        found["score_scale"] = number(config, family.scale_key, default) ** family.scale_power
    if family.soft_caps:
        for field, key in (
            ("score_cap", "attn_logit_softcapping"),
            ("logit_cap", "final_logit_softcapping"),
        ):
            if config.get(key) is not None:
                found[field] = number(config, key, 0.0)
    return found


def _windows(
    config: Mapping[str, Any], family: Family, num_layers: int, max_positions: int
) -> tuple[int, ...]:
    """The window of each layer, 0 where there is none; () if no layer has one in this context."""
    window = config.get("sliding_window", family.window_default)
    slides = family.window == "always" or bool(config.get("use_sliding_window", False))
    if window is None or not slides or family.window == "never":
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ModelError(f"config.json: sliding_window is {window!r}, not a positive integer")
    if window >= max_positions:
        return ()
    windows = [window if kind else 0 for kind in _sliding(config, family, num_layers)]
    return tuple(windows) if any(windows) else ()


def _sliding(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Which layers have the window."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelError(f"config.json: layer_types names no kind for each of {num_layers}")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ModelError(f"config.json: layers of type {unknown.pop()!r} are not supported")
        return [kind == "sliding_attention" for kind in types]
    if family.rope_skips == "listed":
        without = _no_rope(config, family, num_layers)
        return [layer in without for layer in range(num_layers)]
    if family.window == "option":
        first = config.get("max_window_layers", 28)
        return [layer >= first for layer in range(num_layers)]
    every = config.get("sliding_window_pattern") or family.full_every
    if isinstance(every, str):  # such as LLLG, over and over; the last layer sees all
        if set(every) - {"L", "G"}:
            raise ModelError(f"config.json: sliding_window_pattern {every!r} has not only L and G")
        kinds = [every[layer % len(every)] == "L" for layer in range(num_layers)]
        return [*kinds[:-1], False]
    return [not every or (layer + 1) % every > 0 for layer in range(num_layers)]


def _no_rope(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family.attention_only and config.get("position_embedding_type", "rope") != "rope":
        return tuple(range(num_layers))
    if not family.rope_skips:
        return ()
    if family.rope_skips == "full":
        if config.get("sliding_window", family.window_default) is None:
            return ()
        slides = _sliding(config, family, num_layers)
        return tuple(layer for layer, does in enumerate(slides) if not does)
    interval = positive(config, "no_rope_layer_interval", default=4)
    rotated = whole_numbers(config, "no_rope_layers")
    if rotated is None:
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    return tuple(layer for layer, does in enumerate(rotated[:num_layers]) if not does)


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    ends = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ModelError(f"eos_token_id is {eos!r}, not a token id or a list of them")
    return tuple(ends)


def _head_dim(config: Mapping[str, Any], default: int) -> int:
    head_dim = positive(config, "head_dim", default=default)
    if head_dim % HEAD_DIM_MULTIPLE:
        raise ModelError(
            f"config.json: head_dim {head_dim}; only multiples of {HEAD_DIM_MULTIPLE} are supported"
        )
    return head_dim
