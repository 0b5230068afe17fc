"""Makes tiny random checkpoints of every family, written by `transformers`, with odd shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    family: str  # the family's name, spelled like transformers' class names
    changes: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
GLM: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
DELTA: dict[str, Any] = {
    "head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SHARED: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
GRANITE4: dict[str, Any] = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
CASES = {
    "llama": Case("Llama"),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True}),
    "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": Case("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": Case(
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "llama-linear": Case(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-mha-wide-heads": Case("Llama", {"num_key_value_heads": 4, "head_dim": 48}),
    "llama-sharded": Case("Llama", shard="60KB"),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-within-window": Case("Mistral", {"sliding_window": 128}),
    "mistral-window": Case("Mistral", {"sliding_window": 20, "head_dim": 48}),
    "qwen2": Case("Qwen2"),
    "qwen2-tied-yarn": Case("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen2-late-window": Case(
        "Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3-biases": Case("Qwen3", {"attention_bias": True, "head_dim": 16}),
    "smollm3": Case(
        "SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}
    ),
    "smollm3-window": Case(
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 33,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "phi3": Case("Phi3", {"pad_token_id": 0, "num_key_value_heads": 1}),
    "phi3-window": Case("Phi3", {"pad_token_id": 0, "sliding_window": 40}),
    "phi4-mini": Case(
        "Phi3",
        {
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "hidden_size": 128,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [2.0] * 12,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": Case(
        "Mixtral",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 31,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {
            "num_experts": 11,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "head_dim": 48,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3-moe-sparse": Case(
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 33,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2": Case(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v2-lite": Case(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 1,
            "attention_bias": True,
            "vocab_size": 307,
        },
    ),
    "deepseek-v3": Case(
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 40,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "kimi-k2": Case(
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 33,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_interleave": False,
        },
    ),
    "gpt-oss": Case(
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "head_dim": 32,
            "pad_token_id": 0,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen2-moe": Case("Qwen2Moe", {**SHARED, "mlp_only_layers": [1]}),
    "qwen3.5": Case("Qwen3_5Text", DELTA),
    "qwen3.5-wide": Case(
        "Qwen3_5Text",
        {
            **DELTA,
            "num_hidden_layers": 5,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 80,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2,
        },
    ),
    "qwen3.5-moe": Case("Qwen3_5MoeText", {**DELTA, **SHARED}),
    "qwen3-next": Case("Qwen3Next", {**DELTA, **SHARED, "mlp_only_layers": [1]}),
    "olmo2": Case("Olmo2", {"head_dim": 16, "pad_token_id": 0, "num_key_value_heads": 1}),
    "olmo2-two-kv-heads": Case("Olmo2", {"head_dim": 32, "pad_token_id": 0}),
    "olmo3": Case(
        "Olmo3",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "num_hidden_layers": 5,
            "sliding_window": 19,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmoe": Case("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "olmoe-renormalised": Case(
        "Olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 33,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "ernie4.5": Case("Ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "ernie4.5-biases": Case("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": Case(
        "Ernie4_5_Moe",
        {
            "head_dim": 32,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "use_bias": False,
        },
    ),
    "glm4": Case("Glm4", {"head_dim": 32, "pad_token_id": 0}),
    "glm4-without-biases": Case(
        "Glm4",
        {
            "head_dim": 48,
            "pad_token_id": 0,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "exaone4": Case("Exaone4", {"num_hidden_layers": 5, "sliding_window": 21}),
    "exaone4-full": Case(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    ),
    "exaone4-in-window": Case("Exaone4", {"num_hidden_layers": 4, "sliding_window": 4096}),
    "seed-oss": Case("SeedOss", {"head_dim": 32}),
    "seed-oss-biases": Case(
        "SeedOss",
        {"head_dim": 48, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        {
            **GLM,
            "head_dim": 48,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-moe-air": Case("Glm4Moe", {**GLM, "n_shared_experts": 2, "norm_topk_prob": False}),
    "glm4-moe-lite": Case(
        "Glm4MoeLite",
        {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
        | {"q_lora_rank": 40, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
    ),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-moe": Case(
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
    ),
    "granite4": Case(
        "GraniteMoeHybrid",
        {
            **GRANITE4,
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "granite4-without-rope": Case(
        "GraniteMoeHybrid",
        {**GRANITE4, "layer_types": ["attention"] * 3, "position_embedding_type": "nope"},
    ),
    "gemma": Case("Gemma", {"head_dim": 80, "num_key_value_heads": 1, "vocab_size": 301}),
    "gemma2": Case(
        "Gemma2",
        {
            "head_dim": 256,
            "sliding_window": 16,
            "query_pre_attn_scalar": 100,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": Case(
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 17,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
}


def save(case: Case, folder: Path) -> Any:
    """Writes a random checkpoint, in which biases and norms are random, too. Returns transformers'
    model."""
    config = getattr(transformers, f"{case.family}Config")(**{**SIZE, **case.changes})
    torch.manual_seed(0)
    config._attn_implementation = "eager"  # only the eager implementation has caps and sinks
    config._experts_implementation = "eager"  # only the eager implementation works at any size
    name = case.family.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        # Both dtypes see the same weights. A call of model.to() would round the RoPE buffers too.
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder, max_shard_size=case.shard)
    return model
