"""Makes small models with random weights: `python -m tests.live.vllm_layout.models NAME FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
WINDOW = {"head_dim": 64, "sliding_window": 64}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Qwen3Config", {"head_dim": 64}),
    "one head": ("Qwen3Config", {"head_dim": 64, "num_key_value_heads": 1}),
    "window": ("MistralConfig", WINDOW),
    "two groups": ("Gemma3TextConfig", WINDOW | {"layer_types": [SLIDING, FULL] * 2}),
    "uneven groups": (
        "Gemma3TextConfig",
        WINDOW | {"num_hidden_layers": 5, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL]},
    ),
    "recurrent": (
        "Lfm2Config",
        {
            "layer_types": ["conv", FULL] * 2,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 256,  # this field and the next one are those that vLLM reads
            "block_dim": 256,
        },
    ),
    "latent": ("DeepseekV2Config", LATENT),
}


def main() -> None:
    import torch
    import transformers

    name, folder = sys.argv[1:]
    kind, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**BASE | own)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # spreads the weights widely, so that every byte of KVCache matters
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
