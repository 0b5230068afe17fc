"""Writes a Hugging Face checkpoint as a GGUF file, with the names and orders of llama.cpp's
converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.tensors import tensor_shapes
from tests.unit.engine.gguf_files import GgufDraft, Stored, byte_vocabulary

SIGMOIDS = ("deepseek_v3", "glm4_moe_lite")
ROTATES_NEIGHBOURS = ("llama", "granite", "granitemoe", "smollm3", "ernie4_5", "glm4")
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA = ("qwen35", "qwen35moe")
AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
RENAMED = {
    "gemma2": AROUND,
    "gemma3": AROUND,
    "olmo2": AROUND,
    "exaone4": AROUND,
    "glm4": AROUND,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "qwen35": {"post_attention_layernorm": "post_attention_norm"},
    "qwen35moe": {"post_attention_layernorm": "post_attention_norm"},
}
METADATA = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}


def convert(folder: Path, architecture: str, expert_kind: str = "F32") -> GgufDraft:
    """Writes the checkpoint in `folder` as a file; experts may be stored in Q8_0."""
    config = json.loads((folder / "config.json").read_text())
    draft = GgufDraft(_metadata(config, architecture))
    model = open_model(str(folder), "float32")
    found = {name: model.weights.load(name) for name in tensor_shapes(model.spec)}
    for name, tensor in _renamed(found, config, architecture).items():
        is_expert = "_exps.weight" in name and expert_kind == "Q8_0"
        draft.tensors[name] = in_q8_0(tensor) if is_expert else Stored.of(tensor.contiguous())
    rope = config.get("rope_parameters") or {}
    for which in ("short", "long"):
        if f"{which}_factor" in rope:
            factors = torch.tensor(rope[f"{which}_factor"])
            draft.tensors[f"rope_factors_{which}.weight"] = Stored.of(factors)
    return draft


def in_q8_0(tensor: Tensor) -> Stored:
    groups = tensor.reshape(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 127).half()
    numbers = (groups / scale.float().clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    data = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=1)
    return Stored("Q8_0", tuple(tensor.shape), data.numpy().tobytes())


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    values = dict(config)
    values.setdefault("num_experts", config.get("num_local_experts"))
    if architecture == "gpt-oss":
        values["moe_intermediate_size"] = config["intermediate_size"]
    values["head_dim"] = (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    if architecture in ("deepseek2", "glm4moe"):
        values["num_experts"] = config["n_routed_experts"]
    if architecture == "deepseek2":
        values["num_key_value_heads"] = 1
        values.setdefault("first_k_dense_replace", 1)
    words = byte_vocabulary()
    words += [f"<{i}>" for i in range(config["vocab_size"] - len(words))]
    found: dict[str, Any] = {"general.architecture": architecture}
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    rotated = int(values["head_dim"] * rope.get("partial_rotary_factor", 1))
    found |= {
        f"{architecture}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        f"{architecture}.rope.dimension_count": rotated,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o" if architecture == "gpt-oss" else "dbrx",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * len(words),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if rope.get("rope_type") in ("yarn", "linear"):
        found[f"{architecture}.rope.scaling.type"] = rope["rope_type"]
        found[f"{architecture}.rope.scaling.factor"] = float(rope["factor"])
    original = rope.get("original_max_position_embeddings")
    if original:
        found[f"{architecture}.rope.scaling.original_context_length"] = original
    found |= {
        f"{architecture}.{key}": values[name]
        for key, name in METADATA.items()
        if values.get(name) is not None
    }
    if architecture in ("olmo2", "exaone4") and config.get("sliding_window"):
        kinds = config["layer_types"]
        found[f"{architecture}.attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in kinds
        ]
    if architecture == "glm4moe":
        found |= {
            "glm4moe.expert_gating_func": 2,
            "glm4moe.expert_weights_scale": float(config["routed_scaling_factor"]),
            "glm4moe.expert_weights_norm": config["norm_topk_prob"],
        }
    if architecture in DELTA:
        width = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found |= {
            f"{architecture}.ssm.inner_size": width,
            f"{architecture}.full_attention_interval": 4,
            f"{architecture}.rope.dimension_sections": [rotated // 6] * 3 + [0],
        }
    return found | _latent(config) if architecture == "deepseek2" else found


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the keys that only DeepSeek's files have."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "expert_gating_func": 2 if config["model_type"] in SIGMOIDS else 1,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
    }
    if config["model_type"] in SIGMOIDS and config["norm_topk_prob"]:
        found["expert_weights_norm"] = True
    factor = config["rope_parameters"].get("mscale_all_dim")
    if factor is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * factor
    return {f"deepseek2.{key}": value for key, value in found.items()}


def _renamed(
    found: Mapping[str, Tensor], config: Mapping[str, Any], architecture: str
) -> dict[str, Tensor]:
    names = LAYER | RENAMED.get(architecture, {})
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    out: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    if architecture in DELTA:
        found = _with_linear_attention(found, config)
    for name, tensor in found.items():
        adds_one = architecture.startswith("gemma") or architecture in DELTA
        if adds_one and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        module, _, kind = name.rpartition(".")
        if not module.startswith("model.layers."):
            short = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            out[f"{short.get(module, 'output')}.weight"] = tensor
            continue
        _, _, layer, part = module.split(".", 3)
        if kind in ("A_log", "dt_bias"):
            out[f"blk.{layer}.ssm_{'a' if kind == 'A_log' else 'dt.bias'}"] = tensor
        elif kind == "sinks":
            out[f"blk.{layer}.attn_sinks.weight"] = tensor
        elif kind == "correction":
            out[f"blk.{layer}.exp_probs_b.bias"] = tensor
        elif part == "self_attn.kv_b_proj":
            heads_up = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, up = heads_up.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            out[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2)
            out[f"blk.{layer}.attn_v_b.weight"] = up
        elif part.startswith("mlp.experts."):
            linear = part.rpartition(".")[2].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{linear}_exps.{kind}", []).append(tensor)
        else:
            short_name = names[part]
            if architecture in ROTATES_NEIGHBOURS and short_name in heads:
                by_head = tensor.unflatten(0, (heads[short_name], -1))
                rope = config.get("rope_parameters") or {}
                rotated = int(by_head.shape[1] * rope.get("partial_rotary_factor", 1))
                pairs = by_head[:, :rotated].unflatten(1, (2, -1)).swapaxes(1, 2).flatten(1, 2)
                tensor = torch.cat((pairs, by_head[:, rotated:]), dim=1).flatten(0, 1)
            out[f"blk.{layer}.{short_name}.{kind}"] = tensor
    out |= {name: torch.stack(parts) for name, parts in experts.items()}
    return _fused(out, architecture) if architecture in ("phi3", "glm4") else out


def _with_linear_attention(
    found: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Writes q and its gate alternately, head by head, and value heads alternately by key head."""
    keys, group = config["linear_num_key_heads"], config["linear_num_value_heads"]
    group //= keys
    before_v = 2 * keys * config["linear_key_head_dim"]

    def tiled(tensor: Tensor, dim: int = 0) -> Tensor:
        heads = tensor.unflatten(dim, (keys, group, -1)).transpose(dim, dim + 1)
        return heads.flatten(dim, dim + 2)

    out: dict[str, Tensor] = {}
    for name, tensor in found.items():
        part = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
        if part in ("in_proj_qkv", "conv1d"):
            tensor = torch.cat((tensor[:before_v], tiled(tensor[before_v:])))
        elif part in ("in_proj_z", "in_proj_b", "in_proj_a", "dt_bias"):
            tensor = tiled(tensor)
        elif part == "A_log":
            tensor = -tiled(tensor).exp()
        elif part == "out_proj":
            tensor = tiled(tensor, 1)
        elif name.endswith("shared_gate.weight"):
            tensor = tensor[0]
        if name.endswith("g_proj.weight"):
            heads = config["num_attention_heads"]
            q = out[name.replace("g_proj", "q_proj")]
            both = torch.stack([each.unflatten(0, (heads, -1)) for each in (q, tensor)], dim=1)
            out[name.replace("g_proj", "q_proj")] = both.flatten(0, 2)
        else:
            out[name] = tensor
    return out


def _fused(found: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Joins gate and up in one tensor; of Phi also q, k and v."""
    out = dict(found)
    for layer in range(sum(name.endswith("attn_q.weight") for name in found)):
        prefix = f"blk.{layer}."
        if architecture == "phi3":
            parts = [out.pop(f"{prefix}attn_{part}.weight") for part in "qkv"]
            out[f"{prefix}attn_qkv.weight"] = torch.cat(parts)
        gate = out.pop(f"{prefix}ffn_gate.weight")
        out[f"{prefix}ffn_up.weight"] = torch.cat([gate, out[f"{prefix}ffn_up.weight"]])
    return out
