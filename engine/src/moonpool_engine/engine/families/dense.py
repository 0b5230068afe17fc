"""The families with an MLP in each layer, one description each: how it differs from Llama."""

from __future__ import annotations

from dataclasses import replace

from moonpool_engine.engine.families.family import Family

_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM", norms="both", norm_offset=1.0, activation="gelu_tanh",
    root_embedding=True, window="always", window_default=4096, full_every=2,
    scale_key="query_pre_attn_scalar", scale_power=-0.5, soft_caps=True,
)  # fmt: skip
MISTRAL = Family(
    architecture="MistralForCausalLM", inside=("Mistral3ForConditionalGeneration",),
    biases="none", window="always", window_default=4096,
)  # fmt: skip
QWEN3 = Family(
    architecture="Qwen3ForCausalLM", inside=("Qwen3VLForConditionalGeneration",), qk_norm="head",
    window="option",
)  # fmt: skip
QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM", inside=("Qwen3_5ForConditionalGeneration",),
    qk_norm="head", norm_offset=1.0, biases="none", partial_rope=True, delta="apart",
    defaults=(
        ("partial_rotary_factor", 0.25), ("head_dim", 256), ("num_key_value_heads", 4),
        ("max_position_embeddings", 32768),
    ),
)  # fmt: skip
_OLMO2 = Family(architecture="Olmo2ForCausalLM", norms="post", qk_norm="all")
ERNIE = Family(
    architecture="Ernie4_5ForCausalLM", neighbours=True, mlp_bias=True,
    aliases=(("attention_bias", "use_bias"), ("mlp_bias", "use_bias")),
    defaults=(("tie_word_embeddings", True), ("rms_norm_eps", 1e-5)),
)  # fmt: skip
GRANITE = Family(
    architecture="GraniteForCausalLM", mlp_bias=True, scale_key="attention_multiplier",
    multipliers=True,
)  # fmt: skip

DENSE: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", mlp_bias=True),
    "mistral": MISTRAL,
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", biases="qkv", window="option",
        inside=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    ),
    "qwen3": QWEN3,
    "qwen3_5_text": QWEN3_5,
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM", mlp_bias=True, rope_skips="listed", window="option"
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM", biases="none", fused="qkv", partial_rope=True,
        window="always",
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2, architecture="Olmo3ForCausalLM", window="always", window_default=4096,
        full_every=4, local_unscaled=True, defaults=(("rope_theta", 5e5),),
    ),
    "exaone4": replace(
        _OLMO2, architecture="Exaone4ForCausalLM", biases="none", qk_norm="head",
        window="always", window_default=4096, full_every=4, rope_skips="full",
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM", o_bias_key="attention_out_bias", mlp_bias=True,
        defaults=(("attention_bias", True), ("num_key_value_heads", 8), ("head_dim", 128)),
    ),
    "ernie4_5": ERNIE,
    "glm4": Family(
        architecture="Glm4ForCausalLM", norms="both", o_bias_key="", partial_rope=True,
        neighbours=True, fused="gate_up",
        defaults=(("attention_bias", True), ("partial_rotary_factor", 0.5)),
        stored_names=(
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ),
    ),
    "granite": GRANITE,
    "granitemoehybrid": replace(  # Granite 4
        GRANITE, architecture="GraniteMoeHybridForCausalLM", fused="shared", attention_only=True
    ),
    "gemma": replace(
        _GEMMA2, architecture="GemmaForCausalLM", norms="pre", window="never", scale_key="",
        soft_caps=False,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, architecture="Gemma3ForCausalLM", inside=("Gemma3ForConditionalGeneration",),
        full_every=6, qk_norm="head", local_theta=1e4,
        defaults=(
            ("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4),
            ("head_dim", 256), ("max_position_embeddings", 131072),
        ),
    ),
}  # fmt: skip
"""Dense families by the `model_type` of their configs."""
