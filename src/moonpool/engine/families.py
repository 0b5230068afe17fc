"""The model families that the engine serves, one description each.

A description says how a family differs from Llama. `model_config` reads a checkpoint's config by
it, `tensors` finds the weights by it. The model itself knows no family: it follows the `ModelSpec`
that results. A family whose parts all exist is one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. The defaults are Llama's."""

    architecture: str  # as `architectures` in config.json names it
    norms: Literal["pre", "post", "both"] = "pre"  # before attention and MLP, after them, or both
    norm_offset: float = 0.0  # added to norm weights: Gemma stores weights minus 1
    qk_norm: Literal["", "head", "all"] = ""  # of q and k: per head, or over all heads
    biases: Literal["none", "qkv", "option"] = "option"  # "option": by `attention_bias`
    mlp_bias: bool = False  # whether `mlp_bias` counts
    activation: Literal["silu", "gelu_tanh"] = "silu"
    rope_skips: bool = False  # some layers have no RoPE, by `no_rope_layers`
    partial_rope: bool = False  # whether `partial_rotary_factor` counts
    local_theta: float = 0.0  # of layers with a window, where they have a RoPE of their own
    window: Literal["never", "option", "always"] = "never"  # "option": by `use_sliding_window`
    window_default: int | None = None
    full_every: int = 0  # every n-th layer has no window; 0: all have it
    scale_key: str = ""  # the config's factor of the scores; else head_dim ** -0.5
    scale_power: float = 1.0
    soft_caps: bool = False
    root_embedding: bool = False  # embeddings times the root of the hidden size
    multipliers: bool = False  # factors of embedding, residual and logits
    fused: bool = False  # stored with q, k and v in one tensor, and gate and up in another


def _gemma(architecture: str, **changes: object) -> Family:
    parts: dict[str, object] = {
        "norms": "both",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "root_embedding": True,
        "window": "always",
        "window_default": 4096,
        "scale_key": "query_pre_attn_scalar",
        "scale_power": -0.5,
        "soft_caps": True,
    }
    return Family(architecture=architecture, **{**parts, **changes})  # type: ignore[arg-type]


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", mlp_bias=True),
    "mistral": Family(
        architecture="MistralForCausalLM", biases="none", window="always", window_default=4096
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", biases="qkv", window="option"),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm="head", window="option"),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM", mlp_bias=True, rope_skips=True, window="option"
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        biases="none",
        fused=True,
        partial_rope=True,
        window="always",
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", norms="post", qk_norm="all"),
    "granite": Family(
        architecture="GraniteForCausalLM",
        mlp_bias=True,
        scale_key="attention_multiplier",
        multipliers=True,
    ),
    "gemma": _gemma("GemmaForCausalLM", norms="pre", window="never", scale_key="", soft_caps=False),
    "gemma2": _gemma("Gemma2ForCausalLM", full_every=2),
    "gemma3_text": _gemma("Gemma3ForCausalLM", full_every=6, qk_norm="head", local_theta=10000.0),
}
"""The families by the `model_type` of their configs."""
