"""The sizes of a model that the cost models need; those of known models are in `catalogue.toml`."""

from __future__ import annotations

from moonpool.types import Struct


class ModelShape(Struct, frozen=True):
    """A decoder-only transformer. `gated`: the feed-forward part has a gate and an up projection.
    `tied`: the embedding is the LM head too."""

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
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    bytes_per_activation: float = 2.0

    @property
    def params_per_layer(self) -> int:
        """Weights of one layer's linear maps, without norms and biases."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def params(self) -> int:
        """Weights of all layers, the embedding and the LM head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.params_per_layer + embeddings

    @property
    def weight_bytes(self) -> float:
        """Bytes of `params`."""
        return self.params * self.bytes_per_weight

    @property
    def kv_bytes_per_token_per_layer(self) -> float:
        """2 (K and V) x KV heads x head dimension x bytes of an element."""
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def kv_bytes_per_token(self) -> float:
        """KVCache of one token over all layers, in bytes."""
        return self.layers * self.kv_bytes_per_token_per_layer

    @property
    def activation_bytes_per_token(self) -> float:
        """Bytes of one token's hidden state, the operand of an all-reduce and of a pipeline hop."""
        return self.hidden * self.bytes_per_activation
