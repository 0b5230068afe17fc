"""Models by name: `open_model`, `model_info` and `open_tokenizer`.

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
from typing import Any, TypeGuard

import torch
from safetensors.torch import save_file

from moonpool.engine import induction
from moonpool.engine.checkpoint import (
    SINGLE_FILE,
    WORD_PATTERNS,
    as_list,
    find_folder,
    open_checkpoint,
    read_config,
    sampling_defaults,
)
from moonpool.engine.families.table import FAMILIES
from moonpool.engine.gguf.checkpoint import open_gguf
from moonpool.engine.gguf.files import GGUF_SUFFIX, gguf_file
from moonpool.engine.gguf.tokenizer import gguf_tokenizer
from moonpool.engine.induction import InductionWeights
from moonpool.engine.lora.adapter import Adapter, open_adapters
from moonpool.engine.packing import Weights
from moonpool.engine.pooling import stored_pooling
from moonpool.engine.random_weights import PREFIX, RandomWeights, random_spec
from moonpool.engine.spec import ModelError, ModelSpec
from moonpool.engine.tensors import tensor_shapes
from moonpool.engine.tokenizer import Tokenizer
from moonpool.engine.tokenizers.byte import ByteTokenizer
from moonpool.engine.tokenizers.huggingface import HfTokenizer
from moonpool.types import Pooling

logger = logging.getLogger(__name__)

DEFAULT_MODEL = induction.NAME
BYTE_TOKENIZER = "bytes"
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
    pooling: Pooling = "last"  # of embeddings; "none": by a way that this engine does not compute
    adapters: tuple[Adapter, ...] = ()
    lora_modules: tuple[str, ...] = ()  # as given, so that another process opens the same adapters

    @property
    def adapter_numbers(self) -> dict[str, int]:
        """The number of each LoRA adapter in a step, from 1 on, by its fingerprint."""
        return {adapter.fingerprint: number for number, adapter in enumerate(self.adapters, 1)}


def open_model(name: str, dtype: str, lora_modules: tuple[str, ...] = ()) -> LoadedModel:
    """Opens a built-in model, a checkpoint folder or a Hugging Face id. Raises `ModelError`.

    dtype: "float32" or "bfloat16". Weights are read or made only when an engine packs them.
    lora_modules: adapters, as NAME=PATH.
    """
    model = _open_base(name, dtype)
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
        return LoadedModel(name, induction.SPEC, constructed, dtype, fingerprint, BYTE_TOKENIZER)
    if name.startswith(PREFIX):
        spec, seed = random_spec(name)
        drawn = RandomWeights(spec, seed, wanted)
        return LoadedModel(name, spec, drawn, dtype, drawn.fingerprint, BYTE_TOKENIZER)
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


MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs of a model: vocabulary, end tokens, context length, tokenizer.

    `tokenizer` is as in `LoadedModel`. `max_positions` 0 means unknown.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden_size: int = 0
    pooling: Pooling = "none"  # of its embeddings; "none": this engine computes none
    adapters: tuple[Adapter, ...] = ()


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


def model_info_without_weights(name: str, dtype: str) -> ModelInfo:
    """The info of a model that external engines compute, read without its weights.

    Any architecture works. Raises `ModelError`.
    """
    if name == DEFAULT_MODEL or name.startswith(PREFIX):
        return model_info(name, dtype)
    folder = find_folder(name, WORD_PATTERNS)
    config = read_config(folder)
    inner = config.get("text_config")  # multimodal models
    words = config | inner if isinstance(inner, dict) else config
    vocab_size = words.get("vocab_size")
    if not _is_count(vocab_size) or not 0 < vocab_size <= MAX_VOCAB:
        raise ModelError(
            f"{folder / 'config.json'}: vocab_size {vocab_size!r} is not a valid vocabulary size"
        )
    ends = [*as_list(config.get("eos_token_id")), *as_list(words.get("eos_token_id"))]
    return ModelInfo(
        vocab_size,
        tuple(end for end in dict.fromkeys(ends) if _is_count(end) and 0 <= end < vocab_size),
        0,  # the external engine reports it: RoPE scaling extends the number in config.json
        str(folder),
        sampling_defaults(folder),
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


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


def open_tokenizer(source: str, vocab_size: int) -> Tokenizer:
    """Opens the tokenizer named by `LoadedModel.tokenizer`. Raises `TokenizerError`."""
    if source == BYTE_TOKENIZER:
        return ByteTokenizer(vocab_size)
    path = Path(source)
    return gguf_tokenizer(path) if path.suffix == GGUF_SUFFIX else HfTokenizer(path)
