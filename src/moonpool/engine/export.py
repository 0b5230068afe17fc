"""Writes a model as a Hugging Face folder: other engines can then serve the very same weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from moonpool.engine.builtin import LoadedModel
from moonpool.engine.checkpoint import SINGLE_FILE
from moonpool.engine.spec import FAMILIES, ModelError, ModelSpec
from moonpool.engine.tensors import tensor_shapes


def export_checkpoint(model: LoadedModel, folder: Path) -> None:
    """config.json and safetensors of a built-in model, in its dtype; no tokeniser files.

    Holds all weights in memory at once. Raises `ModelError` for what has a checkpoint already.
    """
    spec = model.spec
    if spec.family != "llama" or spec.rope.kind != "default":
        raise ModelError(f"model {model.name!r} came from a checkpoint: copy that instead")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: model.weights.load(name) for name in tensor_shapes(spec)}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(spec, model.dtype), indent=1))


def _config(spec: ModelSpec, dtype: str) -> dict[str, object]:
    architecture = next(name for name, family in FAMILIES.items() if family == spec.family)
    return {
        "architectures": [architecture],
        "model_type": spec.family,
        "dtype": dtype,
        "torch_dtype": dtype,  # the older spelling, for readers of either
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps,
        "hidden_act": "silu",
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) or None,
    }
