"""A GGUF file's metadata as the `config.json` of the same model, and its names of tensors.

The engine's own reader of configs then makes the `ModelSpec`, with the same refusals as for a
Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.engine.gguf.reader import GgufFile
from moonpool.engine.spec import ModelError
from moonpool.types import Pooling

MAX_CONTEXT = 1 << 21
"""Longer contexts are refused: the rotary table has a row per position."""
SWAPPED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    model: the class in Hugging Face's config. swapped: the rows of q and k are stored in the order
    of a rotation of neighbours, and this engine rotates halves.
    """

    model: str
    swapped: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", swapped=True),
    "mistral": Architecture("MistralForCausalLM", swapped=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_POOLINGS: dict[int, Pooling] = {1: "mean", 3: "last"}
ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(name: str) -> str:
    """The name in a GGUF file of the tensor with this Hugging Face name."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"


def architecture_of(file: GgufFile) -> Architecture:
    """Raises `ModelError` for an architecture that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of the architecture {name!r}; "
            f"supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{file.path} is one part of several: join them with llama-gguf-split --merge"
        )
    return ARCHITECTURES[name]


def hf_config(file: GgufFile) -> dict[str, Any]:
    """What `config.json` would say. Raises `ModelError`."""
    own = architecture_of(file)
    values = _Values(file)
    layers = values.count("block_count")
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} claims {layers} layers, but has {len(file.tensors)} tensors")
    context = values.count("context_length")
    if context > MAX_CONTEXT:
        raise ModelError(f"{file.path} claims a context of {context}, more than {MAX_CONTEXT}")
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    head_dim = values.count("attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if values.count(name, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {name} is not the head dimension, {head_dim}")
    if values.optional("expert_count") not in (None, 0):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not read from GGUF")
    config: dict[str, Any] = {
        "architectures": [own.model],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": values.count("feed_forward_length"),
        "max_position_embeddings": context,
        "rms_norm_eps": _rounded(values.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "sliding_window": values.optional("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(file),
    }
    scaling = _rope_scaling(values)
    return config if scaling is None else config | {"rope_scaling": scaling}


def pooling_of(file: GgufFile) -> Pooling:
    """How the file's model makes embeddings; by the last token if the file does not say."""
    kind = _Values(file).optional("pooling_type")
    if kind in (None, 0):
        return "last"
    return _POOLINGS.get(kind, "none") if isinstance(kind, int) else "none"


def end_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end an answer: of the text, and of the turn."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(token for token in found if token is not None))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _rounded(value: float) -> float:
    """The decimal number that was written as float32."""
    return float(f"{value:.6g}")


def _rope_scaling(values: _Values) -> dict[str, Any] | None:
    kind = values.optional("rope.scaling.type")
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": values.number("rope.scaling.factor", 1.0)}
    original = values.optional("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


class _Values:
    """The metadata of the file's architecture, checked for its types."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._metadata: Mapping[str, Any] = file.metadata
        self._prefix = file.metadata["general.architecture"]

    def optional(self, name: str) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0. An array must have it at every place. Raises ModelError."""
        value = self.optional(name)
        if value is None:
            value = default
        if hasattr(value, "tolist"):
            (value, *others) = sorted(set(value.tolist())) or [None]
            if others:
                raise ModelError(f"{self._path}: {name} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self._path}: {name} is {_short(value)}, not a number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelError for another value, and if the key is absent and has
        no default."""
        value = self.optional(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelError(f"{self._path}: {name} is {_short(value)}, not a number above 0")
        return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
