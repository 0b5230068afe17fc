"""The shapes of the models that the papers and their readers serve, as their public configurations
give them. Only sizes: nothing here computes a time."""

from __future__ import annotations

from moonpool.types import Struct


class ModelShape(Struct, frozen=True):
    """A decoder-only transformer. `gated`: the feed-forward part has a gate beside its up
    projection. `tied`: the embedding serves as the LM head too."""

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
        """Weights of the linear layers; norms and biases are left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def params(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.params_per_layer + embeddings

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_per_weight

    @property
    def kv_bytes_per_token_per_layer(self) -> float:
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers * self.kv_bytes_per_token_per_layer

    @property
    def activation_bytes_per_token(self) -> float:
        """One token's residual stream: what a pipeline hands on and an all-reduce sums up."""
        return self.hidden * self.bytes_per_activation


def _shape(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int],
    gated: bool = True,
    tied: bool = False,
) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab = sizes
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        tied=tied,
    )


SHAPES = (
    # name, (layers, hidden, heads, KV heads, head dimension, FFN width, vocabulary)
    _shape("llama3-8b", (32, 4096, 32, 8, 128, 14336, 128256)),
    _shape("llama3-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
    _shape("llama2-13b", (40, 5120, 40, 40, 128, 13824, 32000)),  # LLaMA-13B's sizes as well
    _shape("llama2-70b", (80, 8192, 64, 8, 128, 28672, 32000)),
    _shape("llama-33b", (60, 6656, 52, 52, 128, 17920, 32000)),
    _shape("llama-65b", (80, 8192, 64, 64, 128, 22016, 32000)),
    _shape("mistral-7b", (32, 4096, 32, 8, 128, 14336, 32000)),  # v0.1, its window left out
    _shape("yi-34b", (60, 7168, 56, 8, 128, 20480, 64000)),
    _shape("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152064)),
    _shape("qwen2.5-32b", (64, 5120, 40, 8, 128, 27648, 152064)),
    _shape("qwen2.5-72b", (80, 8192, 64, 8, 128, 29568, 152064)),
    _shape("falcon-180b", (80, 14848, 232, 8, 64, 59392, 65024), gated=False, tied=True),
    _shape("gpt3-175b", (96, 12288, 96, 96, 128, 49152, 50257), gated=False, tied=True),
    _shape("opt-13b", (40, 5120, 40, 40, 128, 20480, 50272), gated=False, tied=True),
    _shape("opt-66b", (64, 9216, 72, 72, 128, 36864, 50272), gated=False, tied=True),
)
