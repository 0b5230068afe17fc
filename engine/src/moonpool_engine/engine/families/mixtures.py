"""The families with a mixture of experts, one description each: how it differs from Llama."""

from __future__ import annotations

from dataclasses import replace

from moonpool_engine.engine.families.dense import ERNIE, GRANITE, MISTRAL, QWEN3, QWEN3_5
from moonpool_engine.engine.families.family import Experts, Family

_DEEPSEEK2 = Family(
    architecture="DeepseekV2ForCausalLM", latent=True,
    experts=Experts(count="n_routed_experts", renormalise=False, groups="max", dense="first"),
)  # fmt: skip
_DEEPSEEK3 = replace(
    _DEEPSEEK2, architecture="DeepseekV3ForCausalLM",
    experts=Experts(
        count="n_routed_experts", scores="sigmoid", groups="top2", dense="first",
        correction="gate.e_score_correction_bias",
    ),
)  # fmt: skip
_GLM4 = Family(
    architecture="Glm4MoeForCausalLM", qk_norm="head", qk_norm_key="use_qk_norm", o_bias_key="",
    partial_rope=True, experts=_DEEPSEEK3.experts,
    defaults=(
        ("partial_rotary_factor", 0.5), ("first_k_dense_replace", 1), ("n_shared_experts", 1)
    ),
)  # fmt: skip

MIXTURES: dict[str, Family] = {
    "mixtral": replace(
        MISTRAL, architecture="MixtralForCausalLM", inside=(), window_default=None,
        experts=Experts(
            count="num_local_experts", inter="intermediate_size", renormalise=True, stored="w123"
        ),
    ),
    "qwen3_moe": replace(
        QWEN3, architecture="Qwen3MoeForCausalLM", inside=(), experts=Experts(dense="step")
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM", biases="qkv", window="option",
        experts=Experts(shared="shared_expert_intermediate_size", dense="step"),
    ),
    "qwen3_next": replace(
        QWEN3_5, architecture="Qwen3NextForCausalLM", inside=(), delta="joined",
        experts=Experts(shared="shared_expert_intermediate_size", dense="step"),
        defaults=(*QWEN3_5.defaults, ("norm_topk_prob", True)),
    ),
    "qwen3_5_moe_text": replace(
        QWEN3_5, architecture="Qwen3_5MoeForCausalLM",
        inside=("Qwen3_5MoeForConditionalGeneration",),
        experts=Experts(shared="shared_expert_intermediate_size", renormalise=True),
        # no layer has an MLP, so its size is a default
        defaults=(*QWEN3_5.defaults, ("intermediate_size", 512)),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM", qk_norm="all", experts=Experts(inter="intermediate_size")
    ),
    "ernie4_5_moe": replace(
        ERNIE, architecture="Ernie4_5_MoeForCausalLM",
        aliases=(
            *ERNIE.aliases, ("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k"),
            ("n_shared_experts", "moe_num_shared_experts"),
            ("first_k_dense_replace", "moe_layer_start_index"),
        ),
        defaults=(
            *ERNIE.defaults, ("num_experts", 64), ("num_experts_per_tok", 6),
            ("n_shared_experts", 2), ("first_k_dense_replace", 1),
        ),
        experts=Experts(
            renormalise=True, groups="max", dense="first",
            correction="moe_statics.e_score_correction_bias",
        ),
    ),
    "granitemoe": replace(
        GRANITE, architecture="GraniteMoeForCausalLM",
        experts=Experts(
            count="num_local_experts", inter="intermediate_size", scores="chosen", stored="halves"
        ),
    ),
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK3,  # also the type of Kimi K2
    "glm4_moe": _GLM4,
    "glm4_moe_lite": replace(
        _DEEPSEEK3, architecture="Glm4MoeLiteForCausalLM",
        defaults=(("first_k_dense_replace", 1), ("n_shared_experts", 1)),
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
"""Mixtures of experts by the `model_type` of their configs."""
