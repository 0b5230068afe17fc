"""What a description of a model family may say. `table` has the descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP. The defaults are Qwen3's."""

    count: str = "num_experts"  # the config's key
    inter: str = "moe_intermediate_size"  # the config's key
    shared: str = ""  # the config's key of the size of a gated MLP that all rows pass besides
    scores: Literal["softmax", "chosen", "sigmoid"] = "softmax"  # "chosen": softmax of the chosen
    renormalise: bool | None = None  # whether weights sum to 1; None: see `norm_topk_prob`
    groups: Literal["", "max", "top2"] = ""  # experts are in groups, judged by this
    correction: str = ""  # name of the bias that counts in the choice only, or ""
    biases: bool = False  # of the router and the experts
    dense: Literal["", "first", "step"] = ""  # which layers have an MLP
    stored: Literal["modules", "w123", "stacked", "halves"] = "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. The defaults are Llama's."""

    architecture: str  # as `architectures` in config.json names it
    inside: tuple[str, ...] = ()  # architectures of text and images whose text is of this family
    defaults: tuple[tuple[str, float], ...] = ()  # what its configs leave out
    aliases: tuple[tuple[str, str], ...] = ()  # keys of Llama's configs: what its configs call them
    norms: Literal["pre", "post", "both"] = "pre"  # before attention and MLP, after them, or both
    norm_offset: float = 0.0  # added to norm weights: Gemma stores weights minus 1
    qk_norm: Literal["", "head", "all"] = ""  # of q and k: per head, or over all heads
    qk_norm_key: str = ""  # the config's key that asks for it; "" means that it is always there
    biases: Literal["none", "qkv", "option"] = "option"  # "option": by `attention_bias`
    o_bias_key: str = "attention_bias"  # the same of attention's output; "" means that it has none
    mlp_bias: bool = False  # whether `mlp_bias` counts
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    rope_skips: Literal["", "listed", "full"] = ""  # layers without RoPE: those that
    # `no_rope_layers` names, or those without a window where others have one
    partial_rope: bool = False  # whether `partial_rotary_factor` counts
    local_theta: float = 0.0  # of layers with a window, where they have a RoPE of their own
    local_unscaled: bool = False  # layers with a window have the RoPE of the others, unscaled
    window: Literal["never", "option", "always"] = "never"  # "option": by `use_sliding_window`
    window_default: int | None = None
    full_every: int = 0  # every n-th layer has no window; 0 means that all have it
    scale_key: str = ""  # the config's factor of the scores; else head_dim ** -0.5
    scale_power: float = 1.0
    soft_caps: bool = False
    root_embedding: bool = False  # embeddings times the root of the hidden size
    multipliers: bool = False  # factors of embedding, residual and logits
    sinks: bool = False  # a score per head that takes weight from all tokens
    latent: bool = False  # attention over one latent per token (MLA)
    delta: Literal["", "apart", "joined"] = ""  # layers of linear attention (Gated DeltaNet), and
    # whether their projections are stored apart or joined by key head
    experts: Experts | None = None
    fused: Literal["", "qkv", "gate_up", "shared"] = ""  # stored with gate and up in one tensor,
    # with q, k and v in another too, or as `shared_mlp`
    stored_names: tuple[tuple[str, str], ...] = ()  # of a layer's norms: ours, and the stored ones
    neighbours: bool = False  # RoPE rotates neighbours, not halves: rows of q and k are reordered
    attention_only: bool = False  # a hybrid family, of which models without state spaces are served
