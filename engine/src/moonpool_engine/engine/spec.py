"""What a decoder computes: its dimensions and options, whatever family it belongs to.

`families.config` makes a `ModelSpec` of a checkpoint's `config.json`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STATE_HEAD = 16  # floats before a state: the first is the number of its tokens, as int32


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
    attention_factor: float | None = None  # of yarn; None means that it follows from `factor`
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    rotary_dim: int = 0  # leading elements of a head that are rotated; 0 means all of them
    factors: tuple[float, ...] = ()  # longrope: of each pair's wavelength


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over one latent per token (MLA). Its only KV head is `rope_dim` rotated elements,
    then `rank` elements, from which each head's keys and values follow."""

    rank: int
    rope_dim: int
    nope_dim: int  # of each head's queries and keys, not rotated
    value_dim: int  # of each head
    query_rank: int = 0  # of a latent of the queries; 0 means none
    interleaved: bool = True  # rotated pairs are neighbours in the checkpoint


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule (Gated DeltaNet): a state of one size per sequence,
    in place of K and V per token. Each key head serves `value_heads / key_heads` value heads."""

    key_heads: int
    value_heads: int
    key_dim: int  # of each head
    value_dim: int  # of each head
    taps: int  # tokens that the convolution over q, k and v sees, the row's own included
    tiled: bool = False  # value head h has key head h % key_heads, not those of a key head in a row

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
    scores: str = "softmax"  # of all experts; "chosen": of the chosen; "sigmoid": of each
    renormalise: bool = True  # the weights of the chosen sum to 1
    factor: float = 1.0  # of the weights
    groups: int = 1  # experts are chosen from the `kept_groups` best groups
    kept_groups: int = 1
    group_score: str = ""  # "max" of its experts, or "top2": the sum of its best two
    correction: bool = False  # a bias that counts in the choice, not in the weights
    biases: bool = False  # of the router and the experts
    shared_size: int = 0  # intermediate size of an MLP that all rows pass besides
    shared_gate: bool = False  # what it adds is weighted by a sigmoid of each row
    dense_layers: tuple[int, ...] = ()  # the layers with an MLP instead
    own: tuple[int, int] | None = None  # the experts first .. end - 1 of one shard; None means all

    @property
    def own_experts(self) -> range:
        """The experts that are computed here."""
        return range(self.count) if self.own is None else range(*self.own)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder. The defaults are Llama's: norms before grouped-query attention and a SwiGLU.

    `max_positions` is the context that the engine serves; `notes` explain a limit below the
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
    qk_norm: str = ""  # "head": of q and k, per head; "all": over all heads
    norms: str = "pre"  # before attention and MLP, "post": after them, "both"
    norm_offset: float = 0.0  # added to the weights of norms
    activation: str = "silu"  # of the gate; "gelu_tanh"; "clamped": see `engine.ops.Gate`
    gate_alpha: float = 1.0
    gate_limit: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_divisor: float = 1.0
    logit_cap: float = 0.0  # 0: none
    score_scale: float = 0.0  # 0: head_dim ** -0.5
    score_cap: float = 0.0  # 0: none
    windows: tuple[int, ...] = ()  # tokens that rows of each layer see, with their own; 0 means all
    local_rope: RopeSpec | None = None  # of layers with a window, if it is another
    no_rope: tuple[int, ...] = ()  # the layers without RoPE
    sinks: bool = False  # a score per head that takes weight from all tokens
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None  # with num_kv_heads 1 and head_dim rope_dim + rank
    delta: DeltaSpec | None = None  # of `delta_layers`, which have a state in place of K and V
    delta_layers: tuple[int, ...] = ()
    gated_heads: bool = False  # attention's output times the sigmoid of a gate, by element
    head_share: tuple[int, int] = (0, 1)  # of a shard: its number, and how many share the heads
    prefix: str = "model."  # of the stored names of all tensors but the LM head
    joined_experts: bool = False  # the checkpoint has all experts of a layer in one tensor
    further_layers: int = 0  # of the checkpoint, which predict further tokens; not used
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
        """The fields that change results. They are part of the model's fingerprint."""
        computed = asdict(self)
        stored = ("prefix", "joined_experts")  # where its weights are
        for name in ("bos_token_id", "eos_token_ids", "notes", "max_positions", *stored):
            del computed[name]
        del computed["head_share"]  # whole models are named
        return computed

    def extras(self) -> tuple[str, ...]:
        """What this model has and Llama has not, as far as some operations cannot compute it."""
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
