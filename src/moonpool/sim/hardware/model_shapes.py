"""Defines the sizes of a model for the cost models; `catalogue.toml` has known models' sizes."""

from __future__ import annotations

from msgspec import structs

from moonpool.config.tables import ModelConfig
from moonpool.protocol.block_layout import FP8
from moonpool.types import Struct


class ExpertShape(Struct, frozen=True):
    """A mixture of experts in place of the feed-forward part: each token passes `per_token` of
    `count` experts of width `ffn`, and a part of width `shared_ffn` that all tokens pass.

    `dense_layers` layers have the model's `ffn` instead. `bytes_per_weight` is the size of a
    weight of the experts; 0 means the size of the model's other weights.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    bytes_per_weight: float = 0.0


class LatentShape(Struct, frozen=True):
    """Attention over latents (MLA): `rank` + `rope` elements per token and layer are cached, for
    heads whose keys have `nope` + `rope` elements and whose values have `value`.

    `query_rank` is the rank of the queries' latent; 0 means that queries have no latent.
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0


class ModelShape(Struct, frozen=True):
    """A decoder-only transformer. If `gated`, the feed-forward part has a gate and an up
    projection. If `tied`, the embedding is also the LM head.

    A layer attends to `window` tokens, or to all if it is 0; every `full_every`-th layer attends to
    all tokens. Requests hold all KVCache, unless all layers have the window. With `latent`,
    `kv_heads` is 1 and `head_dim` is the latent's rank + rope.
    `bytes_per_embedding` is the size of a weight of embedding and LM head; 0 means the size of
    other weights.
    With `fp8_products`, the layers multiply in FP8 on devices with FP8 products.
    `max_positions` limits the text of a draft model, but of no other model; 0 means no limit.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    window: int = 0
    full_every: int = 0
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    bytes_per_weight: float = 2.0
    bytes_per_embedding: float = 0.0
    fp8_products: bool = False
    bytes_per_kv: float = 2.0
    bytes_per_activation: float = 2.0
    max_positions: int = 0

    @property
    def attention_products(self) -> tuple[tuple[str, int, int, bool], ...]:
        """Name, inputs and outputs of each attention product, and whether heads divide it."""
        if self.latent is None:
            width, both = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
            return (
                ("qkv", self.hidden, width + both, True),
                ("output", width, self.hidden, True),
            )
        part = self.latent
        queries = self.heads * (part.nope + part.rope)
        source = part.query_rank or self.hidden
        down = part.query_rank + part.rank + part.rope
        return (
            ("latents", self.hidden, down, False),
            ("queries", source, queries, True),
            ("keys_values", part.rank, self.heads * (part.nope + part.value), True),
            ("output", self.heads * part.value, self.hidden, True),
        )

    @property
    def params_per_layer(self) -> int:
        """Weights of one dense layer's linear maps, without norms and biases."""
        return self._attention_params + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def _attention_params(self) -> int:
        return sum(inputs * outputs for _, inputs, outputs, _ in self.attention_products)

    @property
    def params(self) -> int:
        """Weights of all layers, the embedding and the LM head."""
        return self._params(self.experts.count) if self.experts else self._params(0)

    @property
    def active_params(self) -> int:
        """Weights that one token passes, the LM head and the embedding included."""
        return self._params(self.experts.per_token) if self.experts else self._params(0)

    def _params(self, experts: int) -> int:
        embeddings = self._embedding_params
        mixture = self.experts
        if mixture is None:
            return self.layers * self.params_per_layer + embeddings
        sparse = self.layers - mixture.dense_layers
        # the last summand is the router
        width = 3 * (experts * mixture.ffn + mixture.shared_ffn) + mixture.count
        dense = mixture.dense_layers * self.params_per_layer
        return dense + sparse * (self._attention_params + self.hidden * width) + embeddings

    @property
    def _embedding_params(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> float:
        """Bytes of `params`."""
        return self._bytes(self.params, self.experts.count if self.experts else 0)

    @property
    def active_weight_bytes(self) -> float:
        """Bytes of `active_params`."""
        return self._bytes(self.active_params, self.experts.per_token if self.experts else 0)

    def _bytes(self, params: int, experts: int) -> float:
        """Bytes of `params` weights, with `experts` experts in each sparse layer."""
        total, mixture = 0.0, self.experts
        if self.bytes_per_embedding:
            total += self._embedding_params * self.bytes_per_embedding
            params -= self._embedding_params
        if mixture is not None and mixture.bytes_per_weight:
            sparse = self.layers - mixture.dense_layers
            in_experts = sparse * 3 * self.hidden * mixture.ffn * experts
            total += in_experts * mixture.bytes_per_weight
            params -= in_experts
        return total + params * self.bytes_per_weight

    @property
    def kv_bytes_per_token_per_layer(self) -> float:
        """2 (K and V; 1 with latents) x KV heads x head dimension x bytes of an element."""
        halves = 2 if self.latent is None else 1
        return halves * self.kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def kv_bytes_per_token(self) -> float:
        """KVCache of one token over all layers, in bytes."""
        return self.layers * self.kv_bytes_per_token_per_layer

    def kv_copies(self, num_devices: int) -> int:
        """Returns how often an instance's devices hold a token's KVCache; each needs the latent."""
        return 1 if self.latent is None else num_devices

    @property
    def windowed_share(self) -> float:
        """The share of the layers that attend to the window only."""
        if not self.window:
            return 0.0
        full = self.layers // self.full_every if self.full_every else 0
        return (self.layers - full) / self.layers

    @property
    def activation_bytes_per_token(self) -> float:
        """Bytes of one token's hidden state, the operand of an all-reduce and of a pipeline hop."""
        return self.hidden * self.bytes_per_activation


WEIGHT_BYTES = {"int4": 0.5 + 4 / 32, "int8": 1.0 + 4 / 256, "fp8": 1.0}


def is_plain(model: ModelConfig) -> bool:
    """Whether weights and KVCache have the formats of the shape itself."""
    return model.quantization == "none" and model.kv_cache_dtype == "auto"


def in_formats(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """Returns the shape with the formats of `model` for weights and KVCache. Weights that are
    already smaller stay as they are.

    The bytes follow from moonpool's formats: int4 has a scale and a minimum of two bytes per 32
    weights, int8 a scale of four bytes per 256, and FP8 KVCache a byte of scale per token, head, K
    and V. Embedding and LM head keep their format, as published checkpoints have them.
    """
    if model.kv_cache_dtype == FP8:
        shape = structs.replace(shape, bytes_per_kv=1.0 + 1.0 / shape.head_dim)
    if model.quantization == "none":
        return shape
    each, mixture = WEIGHT_BYTES[model.quantization], shape.experts
    if mixture is not None and mixture.bytes_per_weight:
        smaller = min(mixture.bytes_per_weight, each)
        mixture = structs.replace(mixture, bytes_per_weight=smaller)
    return structs.replace(
        shape,
        bytes_per_weight=min(shape.bytes_per_weight, each),
        bytes_per_embedding=shape.bytes_per_embedding or shape.bytes_per_weight,
        fp8_products=model.quantization == "fp8" or (shape.fp8_products and each >= 1.0),
        experts=mixture,
    )
