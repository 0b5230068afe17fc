"""The fields of a description of a model family. The module `registry` has the descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP. The defaults are Qwen3's."""

    count: str = "num_experts"  # the config's key of the number of experts
    inter: str = "moe_intermediate_size"  # the config's key of the intermediate size of an expert
    shared: str = ""  # the config's key of the size of a gated MLP that all rows also pass
    # how scores are computed; "chosen": a softmax over the chosen experts
    scores: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    # whether weights sum to 1; None means that `norm_topk_prob` decides
    renormalise: bool | None = None
    groups: Literal["", "max", "top2"] = ""  # how groups of experts are judged; "" means no groups
    correction: str = ""  # name of a bias that counts only in the choice of experts, or ""
    biases: bool = False  # whether the router and the experts have biases
    dense: Literal["", "first", "step"] = ""  # which layers have an MLP in place of experts
    stored: Literal["modules", "w123", "stacked", "halves"] = "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. The defaults are Llama's."""

    architecture: str  # the name under `architectures` in config.json
    # architectures of text and images whose text model is of this family
    inside: tuple[str, ...] = ()
    defaults: tuple[tuple[str, float], ...] = ()  # values that configs of the family leave out
    # keys of Llama's configs -> their names in configs of this family
    aliases: tuple[tuple[str, str], ...] = ()
    # whether norms stand before attention and MLP, after them, or both
    norms: Literal["pre", "post", "both"] = "pre"
    norm_offset: float = 0.0  # added to the weights of norms: Gemma stores weights minus 1
    qk_norm: Literal["", "head", "all"] = ""  # norms of q and k: per head, or over all heads
    # the config's key that enables norms of q and k; "" means that they always exist
    qk_norm_key: str = ""
    # whether linears have biases; "option": if `attention_bias` says so
    biases: Literal["none", "qkv", "option"] = "option"
    # the config's key of the bias of attention's output; "" means no bias
    o_bias_key: str = "attention_bias"
    mlp_bias: bool = False  # whether the config's `mlp_bias` counts
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    rope_skips: Literal["", "listed", "full"] = ""  # layers without RoPE: those that
    # `no_rope_layers` names, or those without a window where others have one
    partial_rope: bool = False  # whether the config's `partial_rotary_factor` counts
    local_theta: float = 0.0  # theta of layers with a window, if they have a separate RoPE
    # whether layers with a window use the RoPE of the others without scaling
    local_unscaled: bool = False
    # whether layers have a window; "option": if `use_sliding_window` says so
    window: Literal["never", "option", "always"] = "never"
    window_default: int | None = None
    full_every: int = 0  # every n-th layer has no window; 0 means that all layers have one
    scale_key: str = ""  # the config's key of the factor of the scores; "" means head_dim ** -0.5
    scale_power: float = 1.0
    soft_caps: bool = False
    root_embedding: bool = False  # whether embeddings are multiplied by the root of the hidden size
    multipliers: bool = False  # whether embedding, residual and logits have factors
    sinks: bool = False  # whether each head has a score that takes weight from all tokens
    latent: bool = False  # whether attention uses one latent per token (MLA)
    delta: Literal["", "apart", "joined"] = ""  # layers of linear attention (Gated DeltaNet), and
    # whether their projections are stored apart or joined by key head
    experts: Experts | None = None
    fused: Literal["", "qkv", "gate_up", "shared"] = ""  # stored with gate and up in one tensor,
    # with q, k and v in another too, or as `shared_mlp`
    # names of a layer's norms: moonpool's, and the stored ones
    stored_names: tuple[tuple[str, str], ...] = ()
    neighbours: bool = False  # RoPE rotates neighbours, not halves: rows of q and k are reordered
    # whether it is a hybrid family, of which only models without state spaces are served
    attention_only: bool = False
