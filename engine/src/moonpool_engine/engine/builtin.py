"""Models by name: `open_model` and `model_info`.

Built in are `moonpool/induction` (the default, `engine.induction`) and `random:...`
(`engine.random_weights`). Any other name is a folder or a Hugging Face id (`engine.checkpoint`).
`export_checkpoint` writes a built-in model as a checkpoint, for other engines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import sampling_defaults
from moonpool.text.model_info import BYTE_TOKENIZER, ModelInfo
from moonpool.types import Pooling
from moonpool_engine.engine import induction
from moonpool_engine.engine.checkpoint import SINGLE_FILE, open_checkpoint
from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.gguf.checkpoint import GgufWeights, open_gguf
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.induction import InductionWeights
from moonpool_engine.engine.lora.adapter import Adapter, open_adapters
from moonpool_engine.engine.packing import Weights
from moonpool_engine.engine.pooling import stored_pooling
from moonpool_engine.engine.random_weights import PREFIX, RandomWeights, random_spec
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.tensors import tensor_shapes
from moonpool_engine.engine.tokenizers import open_tokenizer as open_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MODEL = induction.NAME
ENDLESS_SAMPLING = {"max_tokens": 256.0}
"""The sampling of the built-in models, which do not end an answer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that an engine can pack.

    fingerprint: identifies config and weights for every dtype; equal in every process.
    tokenizer: `BYTE_TOKENIZER` (bytes 0..255, then bos 256, eos 257, pad 258), or the folder with
    the tokenizer's files, or the GGUF file.
    sampling: defaults for requests, by the names of `SamplingParams`.
    """

    name: str
    spec: ModelSpec
    weights: Weights
    dtype: str
    fingerprint: str
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    # pooling of embeddings; "none" if this engine lacks the model's pooling
    pooling: Pooling = "last"
    adapters: tuple[Adapter, ...] = ()
    kv_dtype: str = "auto"  # same meaning as in `BlockLayout`
    lora_modules: tuple[str, ...] = ()  # as the user gave them, for other processes

    @property
    def adapter_numbers(self) -> dict[str, int]:
        """The number of each LoRA adapter in a step, from 1 on, by its fingerprint."""
        return {adapter.fingerprint: number for number, adapter in enumerate(self.adapters, 1)}

    def release(self) -> None:
        """Gives back the memory of weights that were read from a mapped file, which can be read
        again."""
        if isinstance(self.weights, GgufWeights):
            self.weights.release()


def open_model(
    name: str, dtype: str, lora_modules: tuple[str, ...] = (), kv_dtype: str = "auto"
) -> LoadedModel:
    """Opens a built-in model, a checkpoint folder or a Hugging Face id. Raises `ModelError`.

    dtype: "float32" or "bfloat16". Weights are read or made only when an engine packs them.
    lora_modules: adapters, as NAME=PATH. kv_dtype: "fp8", or "auto" for KVCache in `dtype`.
    """
    model = replace(_open_base(name, dtype), kv_dtype=kv_dtype)
    if not lora_modules:
        return model
    adapters = open_adapters(lora_modules, model.spec, DTYPES[dtype])
    return replace(model, adapters=adapters, lora_modules=lora_modules)


def _open_base(name: str, dtype: str) -> LoadedModel:
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    wanted = DTYPES[dtype]
    if name == DEFAULT_MODEL:
        constructed = InductionWeights(wanted)
        fingerprint = constructed.fingerprint
        spec, drawing = induction.SPEC, ENDLESS_SAMPLING
        return LoadedModel(name, spec, constructed, dtype, fingerprint, BYTE_TOKENIZER, drawing)
    if name.startswith(PREFIX):
        spec, seed = random_spec(name)
        drawn = RandomWeights(spec, seed, wanted)
        fingerprint, drawing = drawn.fingerprint, ENDLESS_SAMPLING
        return LoadedModel(name, spec, drawn, dtype, fingerprint, BYTE_TOKENIZER, drawing)
    found = gguf_file(name)
    if found is not None:
        read = open_gguf(found, wanted)
        return LoadedModel(
            name,
            read.spec,
            read.weights,
            dtype,
            read.fingerprint,
            str(found),
            pooling=read.pooling,
        )
    checkpoint = open_checkpoint(name, wanted)
    for note in checkpoint.spec.notes:
        logger.warning("model %s: %s", name, note)
    folder = checkpoint.folder
    sampling = sampling_defaults(folder)
    return LoadedModel(
        name,
        checkpoint.spec,
        checkpoint.weights,
        dtype,
        checkpoint.fingerprint,
        str(folder),
        sampling,
        stored_pooling(folder),
    )


def model_info(name: str, dtype: str, lora_modules: tuple[str, ...] = ()) -> ModelInfo:
    """The info of a model that this engine computes. Raises `ModelError`."""
    model = open_model(name, dtype, lora_modules)
    spec = model.spec
    return ModelInfo(
        spec.vocab_size,
        spec.eos_token_ids,
        spec.max_positions,
        model.tokenizer,
        model.sampling,
        tuple(spec.notes),
        spec.hidden_size,
        model.pooling,
        model.adapters,
    )


def export_checkpoint(model: LoadedModel, folder: Path) -> None:
    """Writes config.json and safetensors of a built-in model, in its dtype, without a tokenizer.

    Holds all weights in memory at once. Raises `ModelError` for a model that is a checkpoint.
    """
    spec = model.spec
    if spec.family != "llama" or spec.rope.kind != "default":
        raise ModelError(f"model {model.name!r} came from a checkpoint: copy that instead")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: model.weights.load(name) for name in tensor_shapes(spec)}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(spec, model.dtype), indent=1))


def _config(spec: ModelSpec, dtype: str) -> dict[str, object]:
    return {
        "architectures": [FAMILIES[spec.family].architecture],
        "model_type": spec.family,
        "dtype": dtype,
        "torch_dtype": dtype,  # the older spelling, which all readers know
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
