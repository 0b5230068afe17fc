"""Describes what a decoder computes: its dimensions and options, whatever its family.

`families.config` makes a `ModelSpec` of a checkpoint's `config.json`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STATE_HEAD = 16  # floats before a state, the first of which is the number of its tokens, as int32


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding and its scaling. Fields that `kind` does not use keep their defaults."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # attention factor of yarn; None means that it follows from `factor`
    attention_factor: float | None = None
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    rotary_dim: int = 0  # number of rotated elements at the beginning of a head; 0 means all
    factors: tuple[float, ...] = ()  # longrope's factor of each pair's wavelength


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over one latent per token (MLA). The only KV head has `rope_dim` rotated elements,
    then `rank` elements, from which the keys and values of each head follow."""

    rank: int
    rope_dim: int
    nope_dim: int  # elements of each head's queries and keys that are not rotated
    value_dim: int  # elements of each head's value
    query_rank: int = 0  # rank of a latent of the queries; 0 means none
    interleaved: bool = True  # whether rotated pairs are neighbours in the checkpoint


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule (Gated DeltaNet): a state of one size per sequence,
    in place of K and V per token. Each key head serves `value_heads / key_heads` value heads."""

    key_heads: int
    value_heads: int
    key_dim: int  # elements of each head's key
    value_dim: int  # elements of each head's value
    taps: int  # number of tokens that the convolution over q, k and v sees, including the row's own
    # whether value head h uses key head h % key_heads; otherwise the value heads of a key head are
    # consecutive
    tiled: bool = False

    @property
    def channels(self) -> int:
        """The elements of q, k and v together, which the convolution passes over."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """The elements of v, and of what the rule returns."""
        return self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """The elements of a projected row: q, k, v, the gate z, and b and a of each value head."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state, as `engine.delta` keeps it in a block."""
        floats = self.values * self.key_dim + self.channels * (self.taps - 1)
        return 4 * (STATE_HEAD + floats)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts: each row's MLP is the weighted sum of the experts chosen for it."""

    count: int
    per_token: int
    intermediate_size: int
    # softmax over all experts; "chosen": over the chosen ones; "sigmoid": of each
    scores: str = "softmax"
    renormalise: bool = True  # whether the weights of the chosen experts sum to 1
    factor: float = 1.0  # factor of the weights of experts
    groups: int = 1  # experts are chosen from the `kept_groups` best groups
    kept_groups: int = 1
    # a group's score: "max" of its experts, or "top2", the sum of its best two
    group_score: str = ""
    # whether a bias counts in the choice of experts, but not in their weights
    correction: bool = False
    biases: bool = False  # whether the router and the experts have biases
    shared_size: int = 0  # intermediate size of an MLP that all rows also pass
    # whether the shared MLP's output is weighted by a sigmoid of each row
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP instead of experts
    own: tuple[int, int] | None = None  # experts first .. end - 1 of one shard; None means all

    @property
    def own_experts(self) -> range:
        """The experts that are computed here."""
        return range(self.count) if self.own is None else range(*self.own)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder. The defaults are Llama's: norms before grouped-query attention and a SwiGLU.

    `max_positions` is the context length that the engine serves; `notes` explain a limit below the
    config's. Values per layer are tuples, empty where all layers have the default.
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
    qk_norm: str = ""  # norms of q and k: "head" for each head; "all": over all heads
    # place of norms: "pre", before attention and MLP; "post", after both; or "both"
    norms: str = "pre"
    norm_offset: float = 0.0  # number added to the weights of norms
    # activation of the gate: "silu", "gelu_tanh" or "clamped" (see `engine.ops.Gate`)
    activation: str = "silu"
    gate_alpha: float = 1.0
    gate_limit: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual
    logit_divisor: float = 1.0
    logit_cap: float = 0.0  # 0: none
    score_scale: float = 0.0  # factor of the scores; 0 means head_dim ** -0.5
    score_cap: float = 0.0  # 0: none
    # number of tokens that rows of each layer see, including their own; 0 means all
    windows: tuple[int, ...] = ()
    local_rope: RopeSpec | None = None  # RoPE of layers with a window, if it differs
    no_rope: tuple[int, ...] = ()  # layers that have no RoPE
    sinks: bool = False  # whether each head has a score that takes weight from all tokens
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None  # the latent, with num_kv_heads 1 and head_dim rope_dim + rank
    # linear attention of `delta_layers`, which have a state in place of K and V
    delta: DeltaSpec | None = None
    delta_layers: tuple[int, ...] = ()
    # whether attention's output is multiplied by the sigmoid of a gate, by element
    gated_heads: bool = False
    # (number of the shard, number of shards that share the heads)
    head_share: tuple[int, int] = (0, 1)
    prefix: str = "model."  # prefix of the stored names of all tensors except the LM head
    joined_experts: bool = False  # whether the checkpoint has all experts of a layer in one tensor
    further_layers: int = 0  # number of unused layers in the checkpoint that predict further tokens
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """The number of elements in all weights; tied weights count once."""
        heads = (3 if self.gated_heads else 2) * self.num_heads + 2 * self.num_kv_heads
        attention = heads * self.head_dim * self.hidden_size
        if self.latent is not None:
            attention = self._latent_parameters(self.latent)
        mlp = sum(self._mlp_parameters(layer) for layer in range(self.num_layers))
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        linear = 0
        if self.delta is not None:
            linear = (self.delta.width + self.delta.values) * self.hidden_size
        num_linear = len(self.delta_layers)
        attentions = (self.num_layers - num_linear) * attention + num_linear * linear
        return attentions + mlp + embeddings + norms

    def _latent_parameters(self, latent: LatentSpec) -> int:
        width = self.num_heads * (latent.nope_dim + latent.rope_dim)
        queries = (latent.query_rank or self.hidden_size) * width
        queries += latent.query_rank * self.hidden_size
        keys = latent.rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        ends = self.hidden_size * (self.head_dim + self.num_heads * latent.value_dim)
        return queries + keys + ends

    def _mlp_parameters(self, layer: int) -> int:
        experts = self.experts
        if experts is None or layer in experts.dense_layers:
            return 3 * self.hidden_size * self.intermediate_size
        width = experts.count * experts.intermediate_size + experts.shared_size
        return self.hidden_size * (3 * width + experts.count)

    def computed_fields(self) -> dict[str, Any]:
        """The fields that change results. These fields are part of the model's fingerprint."""
        computed = asdict(self)
        stored = ("prefix", "joined_experts")  # fields about where weights are stored
        for name in ("bos_token_id", "eos_token_ids", "notes", "max_positions", *stored):
            del computed[name]
        del computed["head_share"]  # only whole models are named, so the share of heads is left out
        return computed

    def extras(self) -> tuple[str, ...]:
        """Returns the features of this model that not all operations compute (see
        `Ops.without`)."""
        found = {
            "sliding windows": any(self.windows),
            "caps on scores": self.score_cap > 0,
            "attention sinks": self.sinks,
            "latent attention": self.latent is not None,
            "a mixture of experts": self.experts is not None,
            "partial RoPE": self.rope.rotary_dim > 0 or bool(self.no_rope),
            "linear attention": self.delta is not None,
        }
        return tuple(name for name, has in found.items() if has)

    def window_of(self, layer: int) -> int:
        """The tokens that a row of the layer sees, its own included; 0 means all."""
        return self.windows[layer] if self.windows else 0

    @property
    def kept_tokens(self) -> int:
        """The newest tokens whose KVCache later rows can see, their own included; 0 means all."""
        return max(self.windows) if self.windows and all(self.windows) else 0

    def scale(self) -> float:
        """The factor of attention's scores."""
        return self.score_scale or self.head_dim**-0.5
