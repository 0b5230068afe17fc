"""A GGUF file's metadata as the `config.json` of the same model.

The engine's own reader of configs then makes the `ModelSpec`, with the same refusals as for a
Hugging Face folder.
"""

from __future__ import annotations

from typing import Any

from moonpool.text.model_error import ModelError
from moonpool.types import Pooling
from moonpool_engine.engine.gguf.architectures import Architecture, architecture_of
from moonpool_engine.engine.gguf.delta import delta_config
from moonpool_engine.engine.gguf.latent import latent_config, routed_experts
from moonpool_engine.engine.gguf.reader import GgufFile
from moonpool_engine.engine.gguf.values import MetadataValues, architecture_values

MAX_CONTEXT = 1 << 21
"""Longer contexts are refused: the rotary table has a row per position."""
_POOLINGS: dict[int, Pooling] = {1: "mean", 3: "last"}
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Returns what the model's `config.json` would contain. Raises `ModelError`."""
    own = architecture_of(file)
    values = architecture_values(file)
    further = 0 if own.latent else values.count("nextn_predict_layers", 0, least=0)
    layers = values.count("block_count") - further
    if layers < 1:
        raise ModelError(f"{file.path} claims {further} layers for further tokens, and no others")
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} claims {layers} layers, but has {len(file.tensors)} tensors")
    context = values.count("context_length")
    if context > MAX_CONTEXT:
        raise ModelError(f"{file.path} claims a context of {context}, more than {MAX_CONTEXT}")
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    head_dim = values.count("attention.key_length", max(hidden // heads, 1))
    if not own.latent:
        _check_head_dims(own, values, file, head_dim)
    config: dict[str, Any] = {
        "architectures": [own.model],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.most("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": values.count(
            "feed_forward_length", values.optional_count("expert_feed_forward_length")
        ),
        "max_position_embeddings": context,
        "rms_norm_eps": _rounded(values.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "sliding_window": values.optional_count("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "num_nextn_predict_layers": further,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": end_token_ids(file),
    }
    config |= _own_numbers(own, values, layers, hidden // heads, head_dim)
    config |= _windows(own, values, layers)
    config |= _mixture(own, values, file)
    if own.latent:
        config |= latent_config(values, file)
    if own.delta:
        config |= delta_config(values)
    scaling = _rope_scaling(own, values, file)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _check_head_dims(
    own: Architecture, values: MetadataValues, file: GgufFile, head_dim: int
) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        if name == "rope.dimension_count" and own.partial_rope:
            continue
        if values.count(name, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {name} is not the head dimension, {head_dim}")


def _own_numbers(
    own: Architecture, values: MetadataValues, layers: int, wide_head: int, head_dim: int
) -> dict[str, Any]:
    """Returns the numbers that only some architectures have."""
    found: dict[str, Any] = {
        key: _rounded(values.number(name)) for key, name in own.numbers.items() if values.has(name)
    }
    if own.baked_norms:  # Gemma
        is_big = own.big_layers == layers
        found["query_pre_attn_scalar"] = wide_head if is_big else head_dim
    rotated = values.count("rope.dimension_count", head_dim)
    if own.partial_rope:
        found["partial_rotary_factor"] = rotated / head_dim
    return found


def _windows(own: Architecture, values: MetadataValues, layers: int) -> dict[str, Any]:
    """Which layers have the window, where a file says it for each."""
    if not values.optional_count("attention.sliding_window"):
        return {}
    found: dict[str, Any] = {"architectures": [own.windowed]} if own.windowed else {}
    pattern = values.flags("attention.sliding_window_pattern")
    if pattern is not None:
        kinds = ("full_attention", "sliding_attention")
        found["layer_types"] = [kinds[slides] for slides in pattern[:layers]]
    return found


def _mixture(own: Architecture, values: MetadataValues, file: GgufFile) -> dict[str, Any]:
    """The keys of a mixture of experts, in the spellings of all its families."""
    if not values.optional_count("expert_count"):
        if not own.model:
            raise ModelError(f"{file.path} has no expert_count; its architecture needs one")
        return {}
    if not own.mixture:
        raise ModelError(
            f"{file.path} holds a mixture of experts, which is not read from GGUF for "
            f"the architecture {file.metadata['general.architecture']!r}"
        )
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        raise ModelError(
            f"{file.path} has a tensor for each expert, as files before April 2024: "
            "use a newer file of this model"
        )
    width = values.optional_count("expert_feed_forward_length")
    width = width or values.count("feed_forward_length")
    chosen = routed_experts(values, file) if own.names_scores else {}
    dense = values.count("feed_forward_length") if own.names_scores else width
    return chosen | {
        "architectures": [own.mixture],
        "num_experts": values.count("expert_count"),
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": width,
        "intermediate_size": dense,
        "norm_topk_prob": chosen.get("norm_topk_prob", own.renormalises),
    }


def pooling_of(file: GgufFile) -> Pooling:
    """How the file's model makes embeddings; by the last token if the file does not say."""
    kind = architecture_values(file).optional_count("pooling_type")
    return "last" if kind is None else _POOLINGS.get(kind, "none")


def end_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end an answer: of the text, and of the turn. Raises `ModelError`."""
    values = MetadataValues(file, "tokenizer.ggml.")
    found = [values.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _rounded(value: float) -> float:
    """The decimal number that was written as float32."""
    return float(f"{value:.6g}")


def _rope_scaling(
    own: Architecture, values: MetadataValues, file: GgufFile
) -> dict[str, Any] | None:
    original = values.optional_count("rope.scaling.original_context_length")
    if own.partial_rope and SHORT_FACTORS in file.tensors:
        if original is None:
            raise ModelError(f"{file.path} lacks rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "short_factor": plain_vector(file, SHORT_FACTORS),
            "original_max_position_embeddings": original,
        }
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": values.number("rope.scaling.factor", 1.0)}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        scaling["truncate"] = own.truncates_yarn
        for name in ("beta_fast", "beta_slow"):
            if values.has(f"rope.scaling.yarn_{name}"):
                scaling[name] = values.number(f"rope.scaling.yarn_{name}")
        if own.latent and values.has("rope.scaling.yarn_log_multiplier"):
            # The converter writes a tenth of it. Both are equal in all DeepSeek's configs.
            factor = _rounded(10 * values.number("rope.scaling.yarn_log_multiplier"))
            scaling |= {"mscale": factor, "mscale_all_dim": factor}
    return scaling


def plain_vector(file: GgufFile, name: str) -> list[float]:
    """A short tensor of float32. Raises `ModelError`."""
    entry = file.tensors[name]
    if entry.kind != "F32" or len(entry.shape) != 1:
        raise ModelError(f"{file.path}: {name} is {entry.kind} {list(entry.shape)}, not F32 [n]")
    found: list[float] = file.tensor(name).tolist()
    return found
