"""The model families that the engine serves, one description each.

A description says how a family differs from Llama. `config` reads a checkpoint's config by it, and
`engine.tensors` finds the weights by it. The model itself knows no family: it follows the
`ModelSpec` that results. A family whose parts all exist is one entry here.
"""

from __future__ import annotations

from dataclasses import replace

from moonpool.engine.families.family import Experts, Family

_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM", norms="both", norm_offset=1.0, activation="gelu_tanh",
    root_embedding=True, window="always", window_default=4096, full_every=2,
    scale_key="query_pre_attn_scalar", scale_power=-0.5, soft_caps=True,
)  # fmt: skip
_MISTRAL = Family(
    architecture="MistralForCausalLM", biases="none", window="always", window_default=4096
)
_QWEN3 = Family(architecture="Qwen3ForCausalLM", qk_norm="head", window="option")

_DEEPSEEK2 = Family(
    architecture="DeepseekV2ForCausalLM", latent=True,
    experts=Experts(count="n_routed_experts", renormalise=False, groups="max", dense="first"),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", mlp_bias=True),
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL, architecture="MixtralForCausalLM", window_default=None,
        experts=Experts(
            count="num_local_experts", inter="intermediate_size", renormalise=True, stored="w123"
        ),
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", biases="qkv", window="option"),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, architecture="Qwen3MoeForCausalLM", experts=Experts(dense="step")
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM", mlp_bias=True, rope_skips=True, window="option"
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM", biases="none", fused=True, partial_rope=True,
        window="always",
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", norms="post", qk_norm="all"),
    "granite": Family(
        architecture="GraniteForCausalLM", mlp_bias=True, scale_key="attention_multiplier",
        multipliers=True,
    ),
    "gemma": replace(
        _GEMMA2, architecture="GemmaForCausalLM", norms="pre", window="never", scale_key="",
        soft_caps=False,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, architecture="Gemma3ForCausalLM", inside="Gemma3ForConditionalGeneration",
        full_every=6, qk_norm="head", local_theta=1e4,
        defaults=(
            ("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4),
            ("head_dim", 256), ("max_position_embeddings", 131072),
        ),
    ),
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": replace(  # Kimi K2 too
        _DEEPSEEK2, architecture="DeepseekV3ForCausalLM",
        experts=Experts(
            count="n_routed_experts", scores="sigmoid", groups="top2", correction=True,
            dense="first",
        ),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM", window="always", window_default=128, full_every=2,
        sinks=True, activation="clamped",
        experts=Experts(
            count="num_local_experts", inter="intermediate_size", scores="chosen",
            biases=True, stored="stacked",
        ),
    ),
}  # fmt: skip
"""The families by the `model_type` of their configs."""
