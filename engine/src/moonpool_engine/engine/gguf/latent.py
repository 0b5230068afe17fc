"""Reads what only GGUF files of DeepSeek's architecture have: the sizes of the latent, the choice
between experts, and the latent's up-projection in two tensors.

llama.cpp's name for it is `deepseek2`. Such files contain DeepSeek V2 and V3, Kimi K2, Moonlight
and any other model with these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.families.stored import Shape
from moonpool_engine.engine.gguf.reader import GgufFile
from moonpool_engine.engine.gguf.values import MetadataValues
from moonpool_engine.engine.spec import LatentSpec, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_UP = "self_attn.kv_b_proj.weight"
_KEYS, _VALUES = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
_SOFTMAX, _SIGMOID = 1, 2
_GROUPS = {(60, 160): (8, 3), (61, 256): (8, 4)}
"""The number of expert groups, and how many of them are chosen, by (layers, experts) of DeepSeek V2
and V3. Files made before October 2025 have no key for these numbers."""


def latent_config(values: MetadataValues, file: GgufFile) -> dict[str, Any]:
    """The keys of `config.json` that only DeepSeek's have. Raises `ModelError`."""
    for name in ("nextn_predict_layers", "attention.temperature_scale"):
        if values.number(name, 0.0, or_zero=True):
            raise ModelError(f"{values.path} has {name}, which is not supported; use another file")
    rope = values.count("rope.dimension_count")
    # Older files give the sizes of a head here, newer files those of the latent.
    key = values.count("attention.key_length_mla", values.count("attention.key_length"))
    value = values.count("attention.value_length_mla", values.count("attention.value_length"))
    if key <= rope:
        raise ModelError(
            f"{values.path}: keys of {key} elements cannot have {rope} rotated ones and others"
        )
    return {
        "intermediate_size": values.count("feed_forward_length"),
        "kv_lora_rank": values.count("attention.kv_lora_rank"),
        "q_lora_rank": values.optional_count("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        **routed_experts(values, file),
    }


def routed_experts(values: MetadataValues, file: GgufFile) -> dict[str, Any]:
    """How a file says which experts are chosen. Raises `ModelError`."""
    dense = values.count("leading_dense_block_count", 0, least=0)
    count = values.count("expert_count")
    scores = values.optional_count("expert_gating_func")
    if scores is None:
        # Files of V2 do not say it. A correction is used only with sigmoid scores.
        scores = _SIGMOID if f"blk.{dense}.exp_probs_b.bias" in file.tensors else _SOFTMAX
    if scores not in (_SOFTMAX, _SIGMOID):
        raise values.error("expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    renormalise = values.flag("expert_weights_norm")
    if renormalise and scores == _SOFTMAX:
        raise ModelError(f"{values.path}: expert_weights_norm is not supported with softmax")
    usual = _GROUPS.get((values.count("block_count"), count), (1, 1))
    groups = values.count("expert_group_count", usual[0])
    name = "DeepseekV3ForCausalLM" if scores == _SIGMOID else "DeepseekV2ForCausalLM"
    return {
        "architectures": [name],
        "first_k_dense_replace": dense,
        "n_routed_experts": count,
        "n_shared_experts": values.count("expert_shared_count", 0, least=0),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "norm_topk_prob": renormalise,
        "n_group": groups,
        "topk_group": values.count("expert_group_used_count", usual[1]),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def latent_shapes(spec: ModelSpec, shapes: Mapping[str, Shape], file: GgufFile) -> dict[str, Shape]:
    """The model's tensors with the up-projections as the file has them: for keys and for values,
    or in one."""
    latent = spec.latent
    assert latent is not None
    heads = spec.num_heads
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if not name.endswith(_UP) or f"blk.{layer}.attn_kv_b.weight" in file.tensors:
            found[name] = shape
            continue
        prefix = name.removesuffix(_UP)
        found[prefix + _KEYS] = (heads, latent.rank, latent.nope_dim)
        found[prefix + _VALUES] = (heads, latent.value_dim, latent.rank)
    return found


def halves_of(name: str) -> tuple[str, str]:
    """The names in `latent_shapes` of an up-projection's two halves."""
    prefix = name.removesuffix(_UP)
    return prefix + _KEYS, prefix + _VALUES


def joined(latent: LatentSpec, keys: Tensor, values: Tensor) -> Tensor:
    """The up-projection, per head the rows for keys, then those for values: [out, rank]."""
    import torch

    keys = keys.view(-1, latent.rank, latent.nope_dim).transpose(1, 2)
    values = values.view(-1, latent.value_dim, latent.rank)
    return torch.cat((keys, values), dim=1).flatten(0, 1)


def is_spare(name: str, file: GgufFile) -> bool:
    """Whether the file has the tensor besides another with the same weights."""
    layer, _, part = name.rpartition(".attn_")
    both = f"{layer}.attn_kv_b.weight" in file.tensors
    return both and part in ("k_b.weight", "v_b.weight")
