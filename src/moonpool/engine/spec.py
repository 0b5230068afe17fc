"""The dimensions and options of a dense decoder, read from `config.json`, and its tensor shapes.

Reads both spellings of RoPE scaling (`rope_scaling` and `rope_parameters`), and refuses every
option that the engine would compute wrongly. It reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MISTRAL_WINDOW = 4096
HEAD_DIM_MULTIPLE = 16
LARGEST = dict.fromkeys(("num_hidden_layers", "num_layers"), 4096)
LARGEST_SIZE = 1 << 24
"""No model is near these. A larger number would fill the memory before any weight is read."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ModelError(ValueError):
    """The model cannot be served; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding and its scaling. Fields that `kind` does not use keep their defaults."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from factor
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder: pre-norm layers of grouped-query attention and a SwiGLU.

    `max_positions` is the context that the engine serves; `notes` explain a limit below the
    config's.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """The number of elements in all weights; tied weights count once."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * (attention + mlp) + embeddings + norms

    def computed_fields(self) -> dict[str, Any]:
        """The fields that change results. They are part of the model's fingerprint."""
        fields = asdict(self)
        for name in ("bos_token_id", "eos_token_ids", "notes", "max_positions"):
            del fields[name]
        return fields


def parse_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a parsed `config.json`. Raises `ModelError`."""
    family = _family(config)
    _refuse_unsupported(config)
    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    all_heads = num_heads if family == "llama" else None  # older Llama configs leave it out
    num_kv_heads = _positive(config, "num_key_value_heads", default=all_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    max_positions, notes = _context(config, family)
    attention_bias = bool(config.get("attention_bias", False))
    takes_attention_bias = family in ("llama", "qwen3")
    return ModelSpec(
        family=family,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size // num_heads),
        intermediate_size=_positive(config, "intermediate_size"),
        max_positions=max_positions,
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (takes_attention_bias and attention_bias),
        o_bias=takes_attention_bias and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos(config),
        notes=notes,
    )


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"config.json: architectures is {architectures!r}, not a list of names")
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(map(str, architectures)) or f"model_type {config.get('model_type')!r}"
    if not architectures and config.get("model_type") in FAMILIES.values():
        return str(config["model_type"])
    raise ModelError(f"unknown architecture {named}; supported: {', '.join(FAMILIES)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = _mapping(config, "quantization_config").get("quant_method", "unknown")
        raise ModelError(
            f"the checkpoint is quantised ({method}); use the original float32, bfloat16 or "
            "float16 checkpoint"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r}; only 'silu' is supported")
    rope = _mapping(config, "rope_parameters")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {partial}; only 1.0 is supported")


def _context(config: Mapping[str, Any], family: str) -> tuple[int, tuple[str, ...]]:
    """The positions that can be served, and notes. Within the sliding window, full attention is
    exact."""
    positions = _positive(config, "max_position_embeddings")
    window = _window(config, family)
    if window is None or window >= positions:
        return positions, ()
    note = (
        f"sliding-window attention is not supported: the context is limited to the window, "
        f"{window} tokens of {positions}, within which full attention is the same"
    )
    return window, (note,)


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """The sliding window in effect: always in Mistral, by option in Qwen, never in Llama."""
    # A config may leave it out; Mistral's default is a window.
    window = config.get("sliding_window", MISTRAL_WINDOW if family == "mistral" else None)
    slides = family == "mistral" or bool(config.get("use_sliding_window", False))
    if window is None or not slides or family == "llama":
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window is {window!r}, not a positive integer")
    return window


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    rope = {**_mapping(config, "rope_scaling"), **_mapping(config, "rope_parameters")}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("config.json: rope parameters that differ by layer are not supported")
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported, only {', '.join(ROPE_KINDS)}")
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(theta)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    try:
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=_rope_factor(config, rope, kind, original),
            original_max_positions=int(original) if kind != "linear" else 0,
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            attention_factor=_optional_float(rope.get("attention_factor")),
            mscale=float(rope.get("mscale") or 0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
            truncate=bool(rope.get("truncate", True)),
        )
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: bad rope scaling {rope}: {error}") from error


def _rope_factor(
    config: Mapping[str, Any], rope: Mapping[str, Any], kind: str, original: float
) -> float:
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        return float(config["max_position_embeddings"] / original)
    if factor is None:
        raise ModelError(f"config.json: rope scaling {kind!r} needs 'factor'")
    if not float(factor) > 0:
        raise ModelError(f"config.json: rope scaling's factor is {factor!r}; it must be above 0")
    return float(factor)


def _optional_float(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    ends = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ModelError(f"eos_token_id is {eos!r}, not a token id or a list of them")
    return tuple(ends)


def _head_dim(config: Mapping[str, Any], default: int) -> int:
    head_dim = _positive(config, "head_dim", default=default)
    if head_dim % HEAD_DIM_MULTIPLE:
        raise ModelError(
            f"config.json: head_dim {head_dim}; only multiples of {HEAD_DIM_MULTIPLE} are supported"
        )
    return head_dim


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of the config; empty if it is missing."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {value!r}, not an object")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, not a number above 0")
    return float(value)


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {name!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {str(value)[:80]!r}, not a positive integer")
    most = LARGEST.get(name, LARGEST_SIZE)
    if value > most:
        raise ModelError(f"config.json: {name} is {str(value)[:80]}; at most {most} is supported")
    return value


Shape = tuple[int, ...]


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """All tensors of a model by Hugging Face name, in the order of use; weights are [out, in]."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q, spec.o_bias),
        "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
        "mlp.up_proj": (inter, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inter, spec.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, (out_features, in_features, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
