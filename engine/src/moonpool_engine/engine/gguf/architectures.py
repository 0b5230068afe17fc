"""The architectures of GGUF files that are read, and where a file has each of a model's tensors.

A file's `general.architecture` names its architecture. A description names the class of
transformers, and tells how llama.cpp's converter stores the weights: renamed, with the experts of a
layer in one tensor, or with the rows of q and k in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown
from moonpool_engine.engine.families.stored import Shape
from moonpool_engine.engine.gguf.delta import delta_place
from moonpool_engine.engine.gguf.reader import GgufFile
from moonpool_engine.engine.gguf.tensor_location import TensorLocation
from moonpool_engine.engine.gguf.values import MetadataValues
from moonpool_engine.engine.spec import ModelSpec

_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SOFT_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An `Architecture` is one value of `general.architecture`. The defaults are Qwen's."""

    model: str = ""  # the class in Hugging Face's config, or "" if only mixtures are read
    mixture: str = ""  # the class of files that have experts, or "" if such files are not read
    windowed: str = ""  # the class of files that have a window, if it differs
    renormalises: bool = True  # whether the weights of the chosen experts sum to 1
    names_scores: bool = False  # whether the metadata say how experts are chosen, like DeepSeek's
    swapped: bool = False  # whether rows of q and k are in the order of a rotation of neighbours
    names: Mapping[str, str] = field(default_factory=dict)  # names of a layer's tensors
    # keys of the config -> keys of the metadata
    numbers: Mapping[str, str] = field(default_factory=dict)
    baked_norms: bool = False  # whether the file has norm weights that include the family's offset
    # whether gate and up are one tensor, and also q, k and v
    fused: Literal["", "qkv", "gate_up"] = ""
    partial_rope: bool = False
    big_layers: int = 0  # a model with this many layers scales scores by hidden size over heads
    truncates_yarn: bool = True
    latent: bool = False  # whether attention uses latents, whose keys and tensors are in `latent`
    delta: bool = False  # whether there is linear attention, whose keys and tensors are in `delta`


ARCHITECTURES = {
    "llama": Architecture(model="LlamaForCausalLM", mixture="MixtralForCausalLM", swapped=True),
    "mistral": Architecture(model="MistralForCausalLM", swapped=True),
    "qwen2": Architecture(model="Qwen2ForCausalLM"),
    "qwen3": Architecture(model="Qwen3ForCausalLM"),
    "qwen3moe": Architecture(mixture="Qwen3MoeForCausalLM"),
    "qwen35": Architecture(
        model="Qwen3_5ForCausalLM", names=_POST_NORM, baked_norms=True, partial_rope=True,
        delta=True,
    ),
    "qwen35moe": Architecture(
        mixture="Qwen3_5MoeForCausalLM", names=_POST_NORM, baked_norms=True, partial_rope=True,
        delta=True,
    ),
    "gemma": Architecture(model="GemmaForCausalLM", baked_norms=True),
    "gemma2": Architecture(
        model="Gemma2ForCausalLM", names=_BOTH_NORMS, numbers=_SOFT_CAPS, baked_norms=True,
        big_layers=46,
    ),
    "gemma3": Architecture(
        model="Gemma3ForCausalLM", names=_BOTH_NORMS, baked_norms=True, big_layers=62,
        numbers=_SOFT_CAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
    ),
    "phi3": Architecture(model="Phi3ForCausalLM", fused="qkv", partial_rope=True),
    "olmo2": Architecture(
        model="Olmo2ForCausalLM", windowed="Olmo3ForCausalLM", names=_BOTH_NORMS
    ),
    "olmoe": Architecture(mixture="OlmoeForCausalLM", renormalises=False),
    "exaone4": Architecture(model="Exaone4ForCausalLM", names=_BOTH_NORMS),
    "seed_oss": Architecture(model="SeedOssForCausalLM", names=_POST_NORM),
    "ernie4_5": Architecture(model="Ernie4_5ForCausalLM", swapped=True),
    "glm4": Architecture(
        model="Glm4ForCausalLM", swapped=True, names=_BOTH_NORMS, fused="gate_up", partial_rope=True
    ),
    "granite": Architecture(model="GraniteForCausalLM", swapped=True, numbers=_SCALES),
    "granitemoe": Architecture(mixture="GraniteMoeForCausalLM", swapped=True, numbers=_SCALES),
    "glm4moe": Architecture(
        mixture="Glm4MoeForCausalLM", names=_POST_NORM, partial_rope=True, names_scores=True
    ),
    "smollm3": Architecture(model="SmolLM3ForCausalLM", swapped=True),
    "gpt-oss": Architecture(
        mixture="GptOssForCausalLM", truncates_yarn=False, names=_POST_NORM
    ),
    # The metadata tell V2 from V3.
    "deepseek2": Architecture(mixture="DeepseekV2ForCausalLM", latent=True),
}  # fmt: skip
SWAPPED = ("attn_q", "attn_k")
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises `ModelError` for an architecture that is not read."""
    name = MetadataValues(file).text("general.architecture")
    if name not in ARCHITECTURES:
        found = f"holds a model of the architecture {shown(name)}" if name else "names none"
        raise ModelError(
            f"{file.path} {found} in general.architecture;"
            f" supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def place_of(own: Architecture, spec: ModelSpec, name: str, shape: Shape) -> TensorLocation:
    """Returns where a file of the architecture has the model's tensor `name` of this shape."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return TensorLocation(f"{_NAMES[module]}.{kind}", shape, shape)
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    prefix = f"blk.{layer}."
    if kind == "sinks":
        return TensorLocation(f"{prefix}attn_sinks.weight", shape, shape)
    if kind == "correction":
        return TensorLocation(f"{prefix}exp_probs_b.bias", shape, shape)
    if part.startswith("mlp.experts."):
        assert spec.experts is not None
        expert, _, linear = part.removeprefix("mlp.experts.").partition(".")
        stored = f"{prefix}{_LAYER_NAMES[f'mlp.{linear}']}_exps.{kind}"
        rows = prod(shape[:-1])
        return TensorLocation(stored, (spec.experts.count, *shape), shape, int(expert) * rows)
    if own.fused and kind == "weight":
        found = _fused(spec, part, own.fused)
        if found is not None:
            stored, first, rows = found
            return TensorLocation(f"{prefix}{stored}.weight", (rows, shape[1]), shape, first)
    if own.delta:
        place = delta_place(spec, prefix, part, kind, shape)
        if place is not None:
            return place
    stored = own.names.get(part) or _LAYER_NAMES.get(part, part)
    return TensorLocation(f"{prefix}{stored}.{kind}", shape, shape)


def _fused(spec: ModelSpec, part: str, fused: str) -> tuple[str, int, int] | None:
    """Returns the stored tensor that contains this linear, the linear's first row in that tensor,
    and the number of rows of the tensor, or None if the linear is stored alone."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inter = spec.intermediate_size
    if fused == "gate_up" and part.startswith("self_attn."):
        return None
    return {
        "self_attn.q_proj": ("attn_qkv", 0, q + 2 * kv),
        "self_attn.k_proj": ("attn_qkv", q, q + 2 * kv),
        "self_attn.v_proj": ("attn_qkv", q + kv, q + 2 * kv),
        "mlp.gate_proj": ("ffn_up", 0, 2 * inter),
        "mlp.up_proj": ("ffn_up", inter, 2 * inter),
    }.get(part)
